"""How long kernels take in modelled time: their launch, and the larger of what computing and moving bytes need."""

from __future__ import annotations

import json

import pytest

from emulator.tests.launch import EMULATOR, run, write_script
from emulator.tests.timed import machine

pytestmark = [
    pytest.mark.once(why="its process has a schedule of its own"),
    pytest.mark.slow(why="a process imports torch, and computes all kinds of kernels"),
]

MEASURE = """
    import json
    import ascend_emulator
    import torch
    import torch.nn.functional as F
    import torch_npu

    def tensor(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device="npu")

    def time(name, work):
        torch.npu.synchronize()
        with ascend_emulator.record_timeline() as spans:
            work()
            torch.npu.synchronize()
        found[name] = [[span.name, round((span.end - span.start) * 1e9)] for span in spans]

    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        square = tensor(256, 256, dtype=dtype)
        time(f"square {dtype}", lambda: square @ square)
    thin, wide = tensor(256, 4, dtype=torch.float16), tensor(4, 256, dtype=torch.float16)
    time("thin", lambda: thin @ wide)
    batch, other = tensor(4, 128, 64), tensor(4, 64, 320)
    time("batch", lambda: torch.bmm(batch, other))
    rows, weight, bias = tensor(8, 16, 64), tensor(320, 64), tensor(320)
    time("linear", lambda: F.linear(rows, weight, bias))
    vector = tensor(256)
    time("vector", lambda: torch.mv(tensor(256, 256), vector))
    grouped, experts = tensor(64, 256), tensor(2, 256, 128)
    groups = torch.tensor([16, 64], device="npu")
    time("groups", lambda: torch_npu.npu_grouped_matmul(
        [grouped], [experts], group_list=groups, group_type=0, split_item=2))

    a, b, column = tensor(1000, 1000), tensor(1000, 1000), tensor(1000, 1)
    time("add", lambda: a + b)
    time("add in place", lambda: a.add_(b))
    time("add expanded", lambda: a + column.expand(1000, 1000))
    time("zero", lambda: a.zero_())
    time("transposed", lambda: a.t().contiguous())
    time("softmax", lambda: a.softmax(-1))
    time("foreach", lambda: torch._foreach_add_([a, b], 1.0))
    index = torch.zeros(500, dtype=torch.int64, device="npu")
    time("embedding", lambda: F.embedding(index, a))
    columns = torch.zeros(1000, 1, dtype=torch.int64, device="npu")
    time("gather", lambda: a.gather(1, columns))
    time("scatter in place", lambda: b.scatter_add_(1, columns, column))
    time("index", lambda: b[index])

    q = tensor(2, 4, 64, 32).requires_grad_()
    for causal in (False, True):
        out = []
        time(f"attention {causal}", lambda: out.append(F.scaled_dot_product_attention(q, q, q, is_causal=causal)))
        grad = torch.ones_like(out[0])
        time(f"attention {causal} backward", lambda: torch.autograd.grad(out[0], q, grad))
    image, kernel = tensor(1, 8, 16, 16).requires_grad_(), tensor(4, 8, 3, 3).requires_grad_()
    time("convolution", lambda: out.append(F.conv2d(image, kernel, padding=1)))
    grad = torch.ones_like(out[-1])
    time("convolution backward", lambda: torch.autograd.grad(out[-1], [image, kernel], grad, retain_graph=True))
    time("convolution backward, half", lambda: torch.autograd.grad(out[-1], kernel, grad))
    turned = tensor(8, 4, 3, 3)
    time("transposed convolution", lambda: F.conv_transpose2d(image.detach(), turned, stride=2))
    print(json.dumps(found))
"""
MATRIX, VECTOR = 10_000, 4_000  # ns of launch
BYTES = 500  # a ns; of a softmax half of it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int]]]:
    folder = tmp_path_factory.mktemp("kernels")
    done = run(*EMULATOR, *machine(folder), write_script(folder, MEASURE), cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: [(kernel, ns) for kernel, ns in spans] for name, spans in json.loads(done.stdout).items()}


def only(found: dict[str, list[tuple[str, int]]], name: str, kernel: str) -> int:
    """The nanoseconds of the one kernel of that name."""
    [ns] = [ns for each, ns in found[name] if each == kernel]
    return ns


@pytest.mark.parametrize(("dtype", "flops_per_ns"), [("bfloat16", 10_000), ("float16", 20_000), ("float32", 5_000)])
def test_a_product_takes_its_flops_by_its_dtype(
    found: dict[str, list[tuple[str, int]]], dtype: str, flops_per_ns: int
) -> None:
    share = 0.5 + 0.5 * (256 - 100) / (300 - 100)
    expected = MATRIX + round(2 * 256**3 / (flops_per_ns * share))
    assert found[f"square torch.{dtype}"] == [("aclnnMatmul", expected)]


@pytest.mark.parametrize(
    ("name", "kernel", "flops", "share"),
    [
        ("batch", "aclnnBatchMatMul", 2 * 4 * 128 * 64 * 320, 0.5),  # the least dimension is 64
        ("linear", "aclnnAddmm", 2 * 128 * 64 * 320, 0.5),
        ("groups", "aclnnGroupedMatmulV4", 2 * 64 * 256 * 128, 0.5),
    ],
)
def test_products_count_all_their_rows(
    found: dict[str, list[tuple[str, int]]], name: str, kernel: str, flops: int, share: float
) -> None:
    assert only(found, name, kernel) == MATRIX + round(flops / (5_000 * share))


def test_a_thin_product_takes_its_bytes(found: dict[str, list[tuple[str, int]]]) -> None:
    assert found["thin"] == [("aclnnMatmul", MATRIX + round((2 * 4 * 256 + 256 * 256) * 2 / BYTES))]
    assert only(found, "vector", "aclnnMv") == VECTOR + round((256 * 256 + 2 * 256) * 4 / BYTES)


@pytest.mark.parametrize(
    ("name", "kernel", "nbytes"),
    [
        ("add", "aclnnAdd", 12_000_000),
        ("add in place", "aclnnInplaceAdd", 12_000_000),  # one operand is read and written
        ("add expanded", "aclnnAdd", 8_004_000),
        ("zero", "aclnnInplaceZero", 4_000_000),
        ("transposed", "aclnnInplaceCopy", 8_000_000),
        ("softmax", "aclnnSoftmax", 16_000_000),  # at half the rate, so as twice as many
        ("foreach", "aclnnForeachAddScalarV2", 16_000_000),
        ("embedding", "aclnnEmbedding", 500 * 8 + 2 * 500 * 4_000),  # the rows that are taken, read and written
        ("gather", "aclnnGather", 1_000 * (8 + 2 * 4)),
        ("scatter in place", "aclnnScatterAdd", 1_000 * (8 + 3 * 4)),
        ("index", "aclnnIndex", 2 * 500 * 4_000),
    ],
)
def test_other_kernels_take_their_bytes(
    found: dict[str, list[tuple[str, int]]], name: str, kernel: str, nbytes: int
) -> None:
    assert found[name] == [(kernel, VECTOR + nbytes // BYTES)]


@pytest.mark.parametrize(("causal", "part"), [(False, 1.0), (True, 0.5)])
def test_causal_attention_counts_half_and_its_backward_two_and_a_half_times(
    found: dict[str, list[tuple[str, int]]], causal: bool, part: float
) -> None:
    share = 0.2 + 0.4 * (32 - 16) / (48 - 16)
    ns = part * 2 * (2 * 4) * 64 * 64 * (32 + 32) / (5_000 * share)
    assert only(found, f"attention {causal}", "aclnnFlashAttentionScore") == MATRIX + round(ns)
    backward = only(found, f"attention {causal} backward", "aclnnFlashAttentionScoreGrad")
    assert backward == MATRIX + round(2.5 * ns)


def test_convolutions_take_their_flops(found: dict[str, list[tuple[str, int]]]) -> None:
    ns = 2 * (4 * 16 * 16) * (8 * 3 * 3) / (5_000 * 0.2)
    assert only(found, "convolution", "aclnnConvolution") == MATRIX + round(ns)
    assert only(found, "convolution backward", "aclnnConvolutionBackward") == MATRIX + round(2 * ns)
    assert only(found, "convolution backward, half", "aclnnConvolutionBackward") == MATRIX + round(ns)
    assert only(found, "transposed convolution", "aclnnConvolution") == MATRIX + round(
        2 * (8 * 16 * 16) * (4 * 3 * 3) / (5_000 * 0.2)
    )
