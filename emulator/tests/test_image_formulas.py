"""Boxes in images and what lies in them, against formulas on the CPU that go box by box and pixel by pixel."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import assert_equal, constant, random_inputs, with_gradients

npu = torch.ops.npu

# torch_npu says once in a process that it would have liked to.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")


def centred_boxes() -> list[Tensor]:
    """Two lists of boxes, each column a centre and a size."""
    return [(each.abs() * 3 + 0.5) for each in random_inputs([(4, 7), (4, 7)], torch.float32)]


def distance_iou(boxes: Tensor, others: Tensor, kind: str) -> Tensor:
    results = []
    for (x, y, w, h), (u, v, p, q) in zip(boxes.unbind(1), others.unbind(1), strict=True):
        left, right = torch.minimum(x - w / 2, u - p / 2), torch.maximum(x + w / 2, u + p / 2)
        top, bottom = torch.minimum(y - h / 2, v - q / 2), torch.maximum(y + h / 2, v + q / 2)
        common = (w + p - (right - left)).clamp_min(0) * (h + q - (bottom - top)).clamp_min(0)
        whole = w * h + p * q - common
        if kind == "giou":
            hull = (right - left) * (bottom - top)
            results.append(common / whole - (hull - whole) / hull)
            continue
        result = common / whole - ((x - u) ** 2 + (y - v) ** 2) / ((right - left) ** 2 + (bottom - top) ** 2)
        if kind == "ciou":
            shapes = 4 / math.pi**2 * (torch.atan(p / q) - torch.atan(w / h)) ** 2
            result = result - (shapes / (1 - common / whole + shapes)).detach() * shapes
        results.append(result)
    return torch.stack(results)


@pytest.mark.parametrize("kind", ["giou", "diou", "ciou"])
def test_boxes_have_their_distance_and_its_gradients(kind: str) -> None:
    shape = (-1, 1) if kind == "giou" else (1, -1)
    ours = {
        "giou": lambda a, b: npu.npu_giou(a, b, True, False, 0),
        "diou": lambda a, b: npu.npu_diou(a, b, True, False, 0),
        "ciou": lambda a, b: npu._npu_ciou(a, b, True, False, 0, True)[0],
    }[kind]
    result = with_gradients(ours, [each.npu() for each in centred_boxes()])
    expected = with_gradients(lambda a, b: distance_iou(a, b, kind).reshape(shape), centred_boxes())
    assert_equal(result, expected, 1e-5)


def test_each_box_is_set_beside_each_other() -> None:
    boxes = torch.tensor([[10.0, 55, 85, 160]])
    others = torch.tensor([[18.0, 45, 80, 130], [38, 85, 70, 230]])
    shares = torch.tensor([4650 / 8495, 2400 / 10115])
    for operator in (npu.npu_iou, npu.npu_ptiou):
        assert_equal(operator(others.npu(), boxes.npu()), shares.unsqueeze(0), 1e-3)
        assert_equal(
            operator(boxes.npu(), others.npu(), 1),
            (shares * 0 + torch.tensor([4650 / 5270, 2400 / 4640]))[:, None],
            1e-3,
        )
    assert_equal(
        npu.npu_ciou(*(each.t().contiguous().npu() for each in (boxes, others)), False, True).shape, (2, 1)
    )


def at(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Of an image with channels, between its pixels; zeros around it."""
    height, width = image.shape[-2:]
    grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
    return F.grid_sample(image[None], grid.view(1, 1, -1, 2), align_corners=True)[0, :, 0]


def aligned(images: Tensor, rois: Tensor, scale: float, height: int, width: int, samples: int, mode: int) -> Tensor:
    results = []
    for image, *corners in rois:
        half, later = 0.5 if mode == 3 else 0, 1 if mode == 1 else 0
        left, top = corners[0] * scale - half, corners[1] * scale - half
        right, bottom = (corners[2] + later) * scale - half, (corners[3] + later) * scale - half
        w, h = right - left, bottom - top
        if mode != 3:
            w, h = w.clamp_min(1), h.clamp_min(1)
        for bin_y in range(height):
            for bin_x in range(width):
                steps = (torch.arange(samples) + 0.5) / samples
                y, x = torch.meshgrid(
                    top + h * (bin_y + steps) / height, left + w * (bin_x + steps) / width, indexing="ij"
                )
                counts = (y >= -1) & (y <= images.size(2)) & (x >= -1) & (x <= images.size(3))
                y, x = y.clamp(0, images.size(2) - 1), x.clamp(0, images.size(3) - 1)
                values = at(images[int(image)], y.flatten(), x.flatten()) * counts.flatten()
                results.append(values.mean(1))
    return torch.stack(results).view(len(rois), height, width, -1).permute(0, 3, 1, 2)


ROIS = torch.tensor([[0, 1.0, 2, 30, 40], [1, -9, 0, 50, 70], [0, 3, 3, 4, 4.0]])


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_regions_are_aligned(mode: int) -> None:
    (images,) = random_inputs([(2, 3, 12, 14)], torch.float32)
    results = with_gradients(lambda x: aligned(x, ROIS, 0.25, 3, 4, 2, mode), [images])
    ours = npu.npu_roi_align(images.detach().npu(), ROIS.npu(), 0.25, 3, 4, 2, mode)
    grad = torch.linspace(-1, 2, ours.numel()).view(ours.shape).npu()
    for_images = npu.npu_roi_alignbk(grad, ROIS.npu(), list(images.shape), 4, 3, 0.25, 2, mode)
    assert_equal([ours, for_images], results, 1e-5)


def test_regions_without_a_number_of_samples_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="npu_roi_align with a sample_num"):
        npu.npu_roi_align(torch.ones(1, 1, 4, 4).npu(), ROIS.npu(), 1.0, 2, 2, 0, 0)


def pooled(images: Tensor, rois: Tensor, scale: float, group: int, channels: int) -> Tensor:
    results = []
    for image, *corners in rois.transpose(1, 2).reshape(-1, 5).tolist():
        (left, top), (right, bottom) = (
            [round(c + add) * scale for c in pair] for pair, add in ((corners[:2], 0), (corners[2:], 1))
        )
        h, w = max(bottom - top, 0.1) / group, max(right - left, 0.1) / group
        for channel in range(channels):
            for i in range(group):
                for j in range(group):
                    rows = slice(max(math.floor(top + i * h), 0), max(math.ceil(top + (i + 1) * h), 0))
                    columns = slice(max(math.floor(left + j * w), 0), max(math.ceil(left + (j + 1) * w), 0))
                    part = images[int(image), (channel * group + i) * group + j, rows, columns]
                    results.append(part.mean() if part.numel() else part.sum())
    return torch.stack(results).view(-1, channels, group, group)


def test_regions_are_pooled_by_place() -> None:
    (images,) = random_inputs([(2, 2 * 4, 9, 10)], torch.float32)
    rois = torch.tensor([[[0.0], [3], [2], [30], [17]], [[1], [1], [4], [90], [50]]])
    result = with_gradients(lambda x: npu.npu_ps_roi_pooling(x, constant(rois, x), 0.25, 2, 2), [images.npu()])
    assert_equal(result, with_gradients(lambda x: pooled(x, rois, 0.25, 2, 2), [images]), 1e-5)


def test_the_anchors_of_a_box_s_middle_are_flagged() -> None:
    boxes = torch.tensor([[0.0, 0, 6, 2], [8, 8, 10, 10]])
    flags = npu.npu_anchor_response_flags(boxes.npu(), [3, 4], [4, 4], 2)
    expected = torch.zeros(12, 2, dtype=torch.uint8)
    expected[0] = expected[2 * 4 + 2] = 1
    assert_equal(flags, expected.flatten())


def deformed(modulated: bool) -> Callable[..., Tensor]:
    """A 3 by 3 convolution with two groups of offsets, stride 2 and padding 1."""

    def of(images: Tensor, weight: Tensor, offset: Tensor, bias: Tensor) -> Tensor:
        height, width = offset.shape[2:]
        moves = offset.view(images.size(0), -1, 2, 3, 3, height, width)
        parts = []
        for n, image in enumerate(images):
            for group, half in enumerate(image.chunk(2)):
                y = (
                    moves[n, 1, group]
                    + torch.arange(height).view(-1, 1) * 2
                    - 1
                    + torch.arange(3).view(-1, 1, 1, 1)
                )
                x = moves[n, 0, group] + torch.arange(width) * 2 - 1 + torch.arange(3).view(-1, 1, 1)
                taps = at(half, y.flatten(), x.flatten()).view(-1, 3, 3, height, width)
                parts.append(taps * moves[n, 2, group] if modulated else taps)
        taps = torch.stack(parts).view(images.size(0), -1, 3, 3, height, width)
        return torch.einsum("ncijyx,ocij->noyx", taps, weight) + bias.view(-1, 1, 1)

    return of


@pytest.mark.parametrize("modulated", [True, False])
def test_convolutions_are_deformed(modulated: bool) -> None:
    parts = 3 if modulated else 2
    shapes = [(2, 4, 6, 8), (6, 4, 3, 3), (2, parts * 2 * 9, 3, 4), (6,)]
    options = ([3, 3], [1, 1, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1], 1, 2, modulated)
    inputs = random_inputs(shapes, torch.float32)
    result = with_gradients(
        lambda *each: npu.npu_deformable_conv2d(*each, *options)[0], [each.npu() for each in inputs]
    )
    assert_equal(result, with_gradients(deformed(modulated), inputs), 1e-4)


def test_boxes_are_encoded_and_decoded() -> None:
    boxes = torch.tensor([[1.0, 2, 3, 4], [3, 4, 9, 6]])
    others = torch.tensor([[5.0, 6, 7, 8], [7, 8, 9, 12]])
    numbers = (0.0, 0.1, 0.0, 0.2, 1.0, 0.5, 1.0, 1.0)
    deltas = npu.npu_bounding_box_encode(boxes.npu(), others.npu(), *numbers)
    assert_equal(deltas[:, 0], torch.tensor([4 / 3, 2 / 7]), 1e-3)
    assert_equal(deltas[:, 1], torch.tensor([(4 / 3 - 0.1) / 0.5, (5 / 3 - 0.1) / 0.5]), 1e-3)
    assert_equal(deltas[:, 3], torch.tensor([-0.2, math.log(5 / 3) - 0.2]), 1e-3)
    assert_equal(npu.npu_bounding_box_decode(boxes.npu(), deltas, *numbers, [20, 20], 0.01), others, 2e-2)
    inside = npu.npu_bounding_box_decode(boxes.npu(), deltas, *numbers, [9, 8], 0.01)
    assert_equal(inside.amax(0), torch.tensor([7.0, 8, 7, 8]), 2e-2)


def test_boxes_are_encoded_by_cells() -> None:
    boxes = torch.tensor([[0.0, 0, 8, 4]])
    result = npu.npu_yolo_boxes_encode(boxes.npu(), torch.tensor([[3.0, 0, 7, 8]]).npu(), torch.tensor([8]).npu())
    assert_equal(result, torch.tensor([[0.5 + 1 / 8, 0.5 + 2 / 8, math.log(0.5), math.log(2)]]), 1e-6)


@pytest.mark.parametrize("all_that_have_most", [True, False])
def test_anchors_are_assigned(all_that_have_most: bool) -> None:
    overlaps = torch.tensor([[0.9, 0.3, 0.3, 0.3], [0.1, 0.4, 0.4, 0.1]])
    most, which = overlaps.max(0)
    of_box, at = overlaps.max(1)
    arguments = (overlaps, torch.tensor([1, 1, 1, 0], dtype=torch.uint8), most, which.int(), of_box, at.int())
    ours = [each.npu() for each in (torch.full((4,), -1.0), *arguments)]
    assigned = npu.npu_grid_assign_positive(*ours, 2, 0.5, 0.2, all_that_have_most)
    assert assigned.tolist() == [1, 2, 2 if all_that_have_most else -1, -1]


def test_the_best_boxes_of_each_class_are_kept() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 10, 10], [20, 20, 30, 30]]).view(1, 3, 1, 4)
    scores = torch.tensor([[0.5, 0.1], [0.9, 0.7], [0.6, 0.0]]).unsqueeze(0)
    found = npu.npu_batch_nms(boxes.npu(), scores.npu(), 0.3, 0.5, 2, 4)
    best = [boxes[0, row, 0] for row in (1, 1, 2)]
    assert_equal(found[0], torch.stack([*best, torch.zeros(4)]).unsqueeze(0))
    assert_equal(found[1], torch.tensor([[0.9, 0.7, 0.6, 0]]))
    assert_equal(found[2], torch.tensor([[0.0, 1, 0, 0]]))
    assert found[3].tolist() == [3]
