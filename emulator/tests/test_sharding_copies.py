"""The copies with which FSDP2 fills and empties its buffers are made on the device, and equal the CPU's."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("native_only")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_gathered_is_split(dtype: torch.dtype) -> None:
    gathered, sizes = torch.randn(2, 11).to(dtype), [4, 0, 7]
    ours = [torch.empty(2, size, dtype=dtype, device="npu") for size in sizes]
    torch.split_with_sizes_copy(gathered.to("npu"), sizes, dim=1, out=ours)
    for part, theirs in zip(ours, gathered.split(sizes, 1), strict=True):
        assert part.cpu().equal(theirs)


@pytest.mark.parametrize(("given", "wanted"), [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("shapes", [((4, 3), (2,)), ((5, 3), (1, 2, 2)), ((1, 3), (3,))], ids=str)
def test_gradients_are_cut_into_the_ranks_chunks(
    shapes: tuple[tuple[int, ...], ...], given: torch.dtype, wanted: torch.dtype
) -> None:
    gradients = [torch.randn(shape).to(given) for shape in shapes]
    theirs = torch._chunk_cat(gradients, 0, 2)
    ours = torch.empty(theirs.shape, dtype=wanted, device="npu")
    torch._chunk_cat([gradient.to("npu") for gradient in gradients], 0, 2, out=ours)
    assert ours.cpu().equal(theirs.to(wanted))
