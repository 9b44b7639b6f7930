"""Boxes in images, and what lies in them: operators that CANN computes by aclop, made of others."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ascend_emulator.autograd import gradients


def iou(bboxes: Tensor, gtboxes: Tensor, mode: int = 0) -> Tensor:
    """What each two boxes have in common, as part of both, or of gtboxes' (mode 1). CANN computes it in float16."""
    boxes, others = bboxes.half().float(), gtboxes.half().float().unsqueeze(1)
    common = _area(torch.maximum(boxes[:, :2], others[..., :2]), torch.minimum(boxes[:, 2:], others[..., 2:]))
    whole = _area(others[..., :2], others[..., 2:])
    if mode == 0:
        whole = whole + _area(boxes[:, :2], boxes[:, 2:]) - common
    return (common / (whole + 0.01)).half().to(bboxes.dtype)


def _area(low: Tensor, high: Tensor) -> Tensor:
    return (high - low).clamp_min(0).prod(-1)


def _distance_iou(
    kind: str, boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0
) -> Tensor:
    """IoU less what tells how far two boxes are from each other. trans: they are centres and sizes, not corners."""
    first, second = (each.float() for each in (boxes, gtboxes))
    if is_cross:
        second = second.unsqueeze(-1)
    (low, high), (other_low, other_high) = (_corners(each, trans) for each in (first, second))
    size, other_size = high - low, other_high - other_low
    common = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp_min(0).prod(0)
    whole = other_size.prod(0) if mode == 1 else size.prod(0) + other_size.prod(0) - common
    share = common / (whole + _EPS)
    hull = torch.maximum(high, other_high) - torch.minimum(low, other_low)
    if kind == "giou":
        hull_area = hull.prod(0) + _EPS
        result = share - (hull_area - whole) / hull_area
    else:
        apart = ((low + high - other_low - other_high) / 2).square().sum(0)
        result = share - apart / (hull.square().sum(0) + _EPS)
        if kind == "ciou":
            shapes = (_slope(other_size) - _slope(size)).square() * (4 / math.pi**2)
            weight = (shapes / (1 + _EPS - share + shapes)).detach()
            result = result - weight * shapes
    return (result if is_cross else result.unsqueeze(0)).to(boxes.dtype)


_EPS = 1e-10


def _corners(boxes: Tensor, trans: bool) -> tuple[Tensor, Tensor]:
    first, second = boxes[:2], boxes[2:]
    return (first - second / 2, first + second / 2) if trans else (first, second)


def _slope(size: Tensor) -> Tensor:
    return torch.atan(size[0] / size[1])


def giou(boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0) -> Tensor:
    if not trans or is_cross or mode != 0:
        raise RuntimeError("npu_giou takes trans=True, is_cross=False and mode=0 only")
    return _distance_iou("giou", boxes, gtboxes, trans).reshape(-1, 1)


def diou(boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0) -> Tensor:
    return _distance_iou("diou", boxes, gtboxes, trans, is_cross, mode)


def ciou(
    boxes: Tensor,
    gtboxes: Tensor,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
    atan_sub_flag: bool = False,
) -> Tensor:
    return torch.ops.npu._npu_ciou(boxes, gtboxes, trans, is_cross, mode, atan_sub_flag)[0]  # type: ignore[no-any-return]


def ciou_and_slopes(
    boxes: Tensor,
    gtboxes: Tensor,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
    atan_sub_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """The second is what CANN keeps for the derivative, which does without it here."""
    result = _distance_iou("ciou", boxes, gtboxes, trans, is_cross, mode)
    return result, torch.zeros_like(result, dtype=torch.float32)


def giou_backward(
    grad: Tensor, boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0
) -> tuple[Tensor, ...]:
    return _distance_iou_backward("giou", grad, boxes, gtboxes, trans, is_cross, mode)


def diou_backward(
    grad: Tensor, boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0
) -> tuple[Tensor, ...]:
    return _distance_iou_backward("diou", grad, boxes, gtboxes, trans, is_cross, mode)


def ciou_backward(
    grad: Tensor,
    boxes: Tensor,
    gtboxes: Tensor,
    atan_sub: Tensor | None,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
) -> tuple[Tensor, ...]:
    return _distance_iou_backward("ciou", grad, boxes, gtboxes, trans, is_cross, mode)


def _distance_iou_backward(
    kind: str, grad: Tensor, boxes: Tensor, gtboxes: Tensor, trans: bool, is_cross: bool, mode: int
) -> tuple[Tensor, ...]:
    if not trans or is_cross or mode != 0:
        raise RuntimeError(f"npu_{kind} has a derivative for trans=True, is_cross=False and mode=0 only")

    def of(boxes: Tensor, gtboxes: Tensor) -> Tensor:
        return _distance_iou(kind, boxes, gtboxes, trans).reshape(grad.shape)

    return gradients(of, (boxes, gtboxes), grad)


def _sampled(images: Tensor, image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Between the four pixels around each point, of which those outside are zeros. The channels come last."""
    height, width = images.shape[2:]
    pixels = images.movedim(1, -1).reshape(-1, images.size(1))
    top, left = y.floor(), x.floor()
    result: Tensor | None = None
    for row, in_rows in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, in_columns in ((left, 1 - (x - left)), (left + 1, x - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = (image * height + row.clamp(0, height - 1)) * width + column.clamp(0, width - 1)
            pixel = pixels.index_select(0, place.long().flatten()).view(*place.shape, -1)
            part = pixel * (in_rows * in_columns * inside).unsqueeze(-1)
            result = part if result is None else result + part
    assert result is not None
    return result


def roi_align(
    features: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sample_num: int,
    roi_end_mode: int,
) -> Tensor:
    """Means of points in each bin of a region. roi_end_mode 1 ends it a pixel later, 3 moves it by half of one."""
    if sample_num <= 0 or roi_end_mode not in (0, 1, 3):
        raise NotImplementedError(
            "the emulated NPU has npu_roi_align with a sample_num, and roi_end_mode 0, 1 or 3"
        )
    regions = rois.float()
    low, high = regions[:, 1:3], regions[:, 3:5]
    if roi_end_mode == 1:
        high = high + 1
    low, high = low * spatial_scale, high * spatial_scale
    if roi_end_mode == 3:
        low, high = low - 0.5, high - 0.5
    size = high - low if roi_end_mode == 3 else (high - low).clamp_min(1)

    def points(axis: int, bins: int) -> Tensor:
        steps = (torch.arange(bins * sample_num, device=rois.device) + 0.5) / (bins * sample_num)
        return low[:, axis, None] + size[:, axis, None] * steps

    y, x = points(1, pooled_height).unsqueeze(2), points(0, pooled_width).unsqueeze(1)
    height, width = features.shape[2:]
    counts = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    y, x = torch.broadcast_tensors(y.clamp(0, height - 1), x.clamp(0, width - 1))  # type: ignore[no-untyped-call]
    values = _sampled(features.float(), regions[:, 0].reshape(-1, 1, 1), y, x) * counts.unsqueeze(-1)
    bins = values.view(-1, pooled_height, sample_num, pooled_width, sample_num, values.size(-1))
    return bins.mean((2, 4)).movedim(-1, 1).to(features.dtype).contiguous()


def roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    xdiff_shape: Sequence[int],
    pooled_width: int,
    pooled_height: int,
    spatial_scale: float,
    sample_num: int,
    roi_end_mode: int | None = None,
) -> Tensor:
    mode = 1 if roi_end_mode is None else roi_end_mode

    def of(features: Tensor) -> Tensor:
        return roi_align(features, rois, spatial_scale, pooled_height, pooled_width, sample_num, mode)

    return gradients(of, (grad.new_zeros(*xdiff_shape),), grad)[0]


def ps_roi_pooling(
    features: Tensor, rois: Tensor, spatial_scale: float, group_size: int, output_dim: int
) -> Tensor:
    """The mean of each bin of a region, in the channel that is this bin's. rois: an image, and two corners."""
    height, width = features.shape[2:]
    channels = features.view(-1, output_dim, group_size, group_size, height, width)
    # Of all above and left of a pixel, in float64, for what is far from the corner would lose digits otherwise.
    sums = channels.cumsum(-1, dtype=torch.float64).cumsum(-2)
    sums = pad(sums, [1, 0, 1, 0]).movedim(1, -1)
    regions = rois.float().transpose(1, 2).reshape(-1, 5)
    image = regions[:, 0].long().reshape(-1, 1, 1)
    place = torch.arange(group_size, device=rois.device)

    def edges(low: Tensor, high: Tensor, length: int) -> tuple[Tensor, Tensor]:
        first, last = low.round() * spatial_scale, (high + 1).round() * spatial_scale
        step = ((last - first).clamp_min(0.1) / group_size).unsqueeze(1)
        begin = (place * step + first.unsqueeze(1)).floor()
        end = ((place + 1) * step + first.unsqueeze(1)).ceil()
        return begin.clamp(0, length).long(), end.clamp(0, length).long()

    left, right = (each.unsqueeze(1) for each in edges(regions[:, 1], regions[:, 3], width))
    top, bottom = (each.unsqueeze(2) for each in edges(regions[:, 2], regions[:, 4], height))

    def upto(row: Tensor, column: Tensor) -> Tensor:
        return sums[image, place.unsqueeze(1), place, row, column]

    total = upto(bottom, right) - upto(top, right) - upto(bottom, left) + upto(top, left)
    area = (bottom - top).clamp_min(0) * (right - left).clamp_min(0)
    means = torch.where((area > 0).unsqueeze(-1), total / area.clamp_min(1).unsqueeze(-1), 0.0)
    return means.movedim(-1, 1).to(features.dtype).contiguous()


def ps_roi_pooling_backward(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    group_size: int,
    output_dim: int,
    input_size: Sequence[int],
) -> Tensor:
    """input_size: the images' height and width."""

    def of(features: Tensor) -> Tensor:
        return ps_roi_pooling(features, rois, spatial_scale, group_size, output_dim)

    features = grad.new_zeros(rois.size(0), group_size * group_size * output_dim, *input_size)
    return gradients(of, (features,), grad)[0]


def anchor_response_flags(
    boxes: Tensor, featmap_size: Sequence[int], stride: Sequence[int], num_base_anchors: int
) -> Tensor:
    """1 for the anchors of the cell in which the middle of a box is."""
    height, width = featmap_size
    middles = (boxes[:, :2].float() + boxes[:, 2:].float()) * 0.5
    cells = (middles[:, 1] / stride[1]).floor().long() * width + (middles[:, 0] / stride[0]).floor().long()
    flags = torch.zeros(height * width, dtype=torch.uint8, device=boxes.device)
    flags.index_put_((cells,), torch.ones_like(flags[:1]))
    return flags.repeat_interleave(num_base_anchors)


def deformable_conv2d(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
) -> tuple[Tensor, Tensor]:
    """A convolution of pixels that offset moves. The second result is those pixels, by place and kernel."""
    taps = _taps(input, offset, kernel_size, stride, padding, dilation, deformable_groups, modulated)
    return conv2d(taps, weight.float(), bias, stride=list(kernel_size), groups=groups).to(input.dtype), taps


def _taps(
    input: Tensor,
    offset: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    modulated: bool,
) -> Tensor:
    batch, channels = input.shape[:2]
    (rows, columns), (height, width) = kernel_size, offset.shape[2:]
    moves = offset.float().view(batch, 3 if modulated else 2, groups, rows, columns, height, width)

    def usual(places: int, kernel: int, dim: int, before: int) -> Tensor:
        """Where a convolution reads: for each step of the kernel, and each place."""
        steps = torch.arange(kernel, device=input.device).unsqueeze(1) * dilation[dim]
        return steps + torch.arange(places, device=input.device) * stride[dim] - before

    x = moves[:, 0] + usual(width, columns, 3, padding[2]).view(columns, 1, width)
    y = moves[:, 1] + usual(height, rows, 2, padding[0]).view(rows, 1, height, 1)
    image = torch.arange(batch * groups, device=input.device).view(batch, groups, 1, 1, 1, 1)
    images = input.float().reshape(batch * groups, channels // groups, *input.shape[2:])
    values = _sampled(images, image, y, x)
    if modulated:
        values = values * moves[:, 2].unsqueeze(-1)
    # From batch, group, kernel (2), place (2), channel.
    return values.permute(0, 1, 6, 4, 2, 5, 3).reshape(batch, channels, height * rows, width * columns)


def deformable_conv2d_backward(
    input: Tensor,
    grad: Tensor,
    offset_out: Tensor,
    weight: Tensor,
    offset: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
) -> tuple[Tensor, ...]:
    """For the input, the weight, the offset and the bias."""
    options = (kernel_size, stride, padding, dilation, groups, deformable_groups, modulated)

    def of(input: Tensor, weight: Tensor, offset: Tensor, bias: Tensor) -> Tensor:
        return deformable_conv2d(input, weight, offset, bias, *options)[0]

    return gradients(of, (input, weight, offset, grad.new_zeros(weight.size(0))), grad)


def bounding_box_encode(boxes: Tensor, gtboxes: Tensor, *means_and_stds: float) -> Tensor:
    """How far, and how much larger, the second box is, in sizes of the first. CANN computes it in float16."""
    (x, y, w, h), (u, v, p, q) = (_centred(each.half().float()) for each in (boxes, gtboxes))
    deltas = torch.stack([(u - x) / w, (v - y) / h, (p / w).log(), (q / h).log()], -1)
    means, stds = (torch.tensor(each, device=boxes.device) for each in (means_and_stds[:4], means_and_stds[4:]))
    return ((deltas - means) / stds).half().to(boxes.dtype)


def _centred(boxes: Tensor) -> tuple[Tensor, ...]:
    """The middles, and the sizes, to which the last pixel belongs."""
    left, top, right, bottom = boxes.unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left + 1, bottom - top + 1


def bounding_box_decode(
    rois: Tensor,
    deltas: Tensor,
    means0: float,
    means1: float,
    means2: float,
    means3: float,
    stds0: float,
    stds1: float,
    stds2: float,
    stds3: float,
    max_shape: Sequence[int],
    wh_ratio_clip: float,
) -> Tensor:
    """The box that was encoded. max_shape: the image's height and width, in which it stays."""
    x, y, w, h = _centred(rois.float())
    means, stds = torch.tensor([means0, means1, means2, means3]), torch.tensor([stds0, stds1, stds2, stds3])
    moved = deltas.float() * stds.to(rois.device) + means.to(rois.device)
    limit = abs(math.log(wh_ratio_clip))
    u, v = x + w * moved[:, 0], y + h * moved[:, 1]
    p, q = w * moved[:, 2].clamp(-limit, limit).exp(), h * moved[:, 3].clamp(-limit, limit).exp()
    height, width = max_shape[0] - 1, max_shape[-1] - 1
    sides = [
        (u - p / 2 + 0.5).clamp(0, width),
        (v - q / 2 + 0.5).clamp(0, height),
        (u + p / 2 - 0.5).clamp(0, width),
        (v + q / 2 - 0.5).clamp(0, height),
    ]
    return torch.stack(sides, -1).to(rois.dtype)


def yolo_boxes_encode(boxes: Tensor, gtboxes: Tensor, stride: Tensor, performance_mode: bool = False) -> Tensor:
    """Where in its cell the second box's middle is, and how much larger it is than the first."""
    eps = 1e-6
    low, size = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    other_low, other_size = gtboxes[:, :2], gtboxes[:, 2:] - gtboxes[:, :2]
    apart = (other_low + other_size * 0.5 - low - size * 0.5) / stride.unsqueeze(1)
    return torch.cat([(apart + 0.5).clamp(eps, 1 - eps), (other_size / size).clamp_min(eps).log()], 1)


def grid_assign_positive(
    assigned: Tensor,
    overlaps: Tensor,
    box_responsible_flags: Tensor,
    max_overlaps: Tensor,
    argmax_overlaps: Tensor,
    gt_max_overlaps: Tensor,
    gt_argmax_overlaps: Tensor,
    num_gts: int,
    pos_iou_thr: float,
    min_pos_iou: float,
    gt_max_assign_all: bool,
) -> Tensor:
    """Which box, from 1 on, each anchor is for: the one that it has most of, or one that has most of it."""
    responsible = box_responsible_flags.bool()
    nearest = argmax_overlaps.to(assigned.dtype) + 1
    result = torch.where((max_overlaps > pos_iou_thr) & responsible, nearest, assigned)
    anchors = torch.arange(assigned.size(0), device=assigned.device)
    for box in range(min(num_gts, overlaps.size(0))):
        has_most = overlaps[box] == gt_max_overlaps[box]
        if not gt_max_assign_all:
            has_most = anchors == gt_argmax_overlaps[box]
        counts = has_most & responsible & (gt_max_overlaps[box] > min_pos_iou)
        result = torch.where(counts, torch.full_like(result, box + 1), result)
    return result


def batch_nms(
    boxes: Tensor,
    scores: Tensor,
    score_threshold: float,
    iou_threshold: float,
    max_size_per_class: int,
    max_total_size: int,
    change_coordinate_frame: bool = False,
    transpose_box: bool = False,
) -> tuple[Tensor, ...]:
    """The best boxes of each image that do not overlap others of their class: boxes, scores, classes, how many."""
    if change_coordinate_frame or transpose_box:
        raise NotImplementedError(
            "the emulated NPU has npu_batch_nms without change_coordinate_frame, transpose_box"
        )
    images = [
        _best(*each, score_threshold, iou_threshold, max_size_per_class)[:max_total_size]
        for each in zip(boxes.cpu().float(), scores.cpu().float(), strict=True)
    ]
    counts = torch.tensor([len(image) for image in images], dtype=torch.int32)
    filled = torch.stack([pad(image, [0, 0, 0, max_total_size - len(image)]) for image in images]).to(boxes.dtype)
    results = (filled[..., :4], filled[..., 4], filled[..., 5], counts)
    return tuple(each.contiguous().to(boxes.device) for each in results)


def _best(boxes: Tensor, scores: Tensor, score_threshold: float, iou_threshold: float, most: int) -> Tensor:
    """Of one image, the best first: a box, its score and its class."""
    kept = [torch.zeros(0, 6)]
    for label in range(scores.size(1)):
        score, order = scores[:, label].sort(descending=True, stable=True)
        rest = boxes[order, label if boxes.size(1) > 1 else 0][score > score_threshold]
        left, score = torch.ones(len(rest), dtype=torch.bool), score[: len(rest)]
        for place in range(len(rest)):
            if not left[place] or int(left[:place].sum()) >= most:
                left[place] = False
                continue
            left[place + 1 :] &= _overlap(rest[place], rest[place + 1 :]) <= iou_threshold
        kept.append(torch.cat([rest, score.unsqueeze(1), torch.full((len(rest), 1), float(label))], 1)[left])
    found = torch.cat(kept)
    return found[found[:, 4].argsort(descending=True, stable=True)]


def _overlap(box: Tensor, others: Tensor) -> Tensor:
    common = _area(torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:]))
    return common / (_area(box[:2], box[2:]) + _area(others[:, :2], others[:, 2:]) - common + _EPS)


IMAGE_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_iou": iou,
    "npu::npu_ptiou": iou,
    "npu::npu_giou": giou,
    "npu::npu_giou_backward": giou_backward,
    "npu::npu_diou": diou,
    "npu::npu_diou_backward": diou_backward,
    "npu::npu_ciou": ciou,
    "npu::_npu_ciou": ciou_and_slopes,
    "npu::npu_ciou_backward": ciou_backward,
    "npu::npu_bounding_box_encode": bounding_box_encode,
    "npu::npu_bounding_box_decode": bounding_box_decode,
    "npu::npu_yolo_boxes_encode": yolo_boxes_encode,
    "npu::npu_grid_assign_positive": grid_assign_positive,
    "npu::npu_batch_nms": batch_nms,
    "npu::npu_roi_align": roi_align,
    "npu::npu_roi_alignbk": roi_align_backward,
    "npu::npu_ps_roi_pooling": ps_roi_pooling,
    "npu::npu_ps_roi_pooling_backward": ps_roi_pooling_backward,
    "npu::npu_anchor_response_flags": anchor_response_flags,
    "npu::npu_deformable_conv2d": deformable_conv2d,
    "npu::npu_deformable_conv2dbk": deformable_conv2d_backward,
}
