"""What an operator does not take is refused when it is called, as by CANN, and the device lives on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.launch import EMULATOR, run, write_script


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def places(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="npu")


REFUSED: dict[str, Callable[[], Any]] = {
    "aclnnInplaceAdd": lambda: ones(1).add_(ones(3)),
    "aclnnInplaceMul": lambda: ones(1).mul_(ones(2, 1, 2, 1)),
    "aclnnInplaceMul: result type Float": lambda: ones(2, dtype=torch.int32).mul_(ones(2)),
    "aclnnInplaceAdds": lambda: ones(2, dtype=torch.int32).add_(1.5),
    "aclnnInplaceDivs": lambda: ones(2, dtype=torch.int32).div_(2),
    "aclnnInplaceDiv": lambda: ones(1).div_(ones(2)),
    "aclnnInplaceDivMod": lambda: ones(1).div_(ones(2), rounding_mode="floor"),
    "aclnnInplaceFloorDivide": lambda: ones(1).floor_divide_(ones(2)),
    "aclnnInplacePowTensorTensor": lambda: ones(1).pow_(ones(2)),
    "aclnnInplaceEqTensor": lambda: ones(1).eq_(ones(2)),
    "aclnnInplaceLogicalAnd": lambda: ones(1).logical_and_(ones(2)),
    "aclnnInplaceBitwiseAndTensor": lambda: ones(1, dtype=torch.int32).bitwise_and_(ones(2, dtype=torch.int32)),
    "aclnnInplaceLerps": lambda: ones(1).lerp_(ones(2), 0.5),
    "aclnnInplaceAddcmul": lambda: ones(1).addcmul_(ones(2), ones(2)),
    "aclnnInplaceCopy": lambda: ones(2).copy_(ones(3)),
    "aclnnInplaceMaskedFillScalar": lambda: ones(2).masked_fill_(ones(3, dtype=torch.bool), 1.0),
    "aclnnMatmul: shapes": lambda: ones(2, 3) @ ones(2, 3),
    "aclnnMatmul: factors must have one dtype": lambda: ones(2, 2) @ ones(2, 2, dtype=torch.float16),
    "aclnnBatchMatMul": lambda: torch.bmm(ones(2, 2, 3), ones(2, 2, 3)),
    "aclnnMv": lambda: torch.mv(ones(2, 3), ones(2)),
    "aclnnDot": lambda: torch.dot(ones(2), ones(3)),
    "aclnnCat": lambda: torch.cat([ones(2, 2), ones(2, 3)]),
    "aclnnFlip": lambda: ones(2, 2).flip(0, 0),
    "aclnnGather": lambda: ones(2, 2).gather(1, places(3, 3, 3)),
    "aclnnScatterAdd": lambda: ones(2, 2).scatter_add_(0, places(3, 3), ones(2, 2)),
    "aclnnIndexSelect": lambda: ones(2, 2).index_select(0, places(2, 2)),
    "aclnnIndexPutImpl": lambda: ones(3, dtype=torch.float64).index_put_((places(1),), ones(1, dtype=torch.int32)),
    "aclnnEmbedding": lambda: F.embedding(ones(2), ones(2, 2)),
}


@pytest.mark.parametrize("operator", REFUSED)
def test_a_wrong_call_is_refused_by_name_and_the_device_lives_on(operator: str) -> None:
    with pytest.raises(RuntimeError, match=operator):
        REFUSED[operator]()
    torch.npu.synchronize()
    assert ones(2).tolist() == [1, 1]


def test_what_fails_on_the_stream_whatever_its_data_is_told_once() -> None:
    torch.ops.npu.npu_swiglu(ones(2, 3))
    with pytest.raises(RuntimeError, match="aclnnSwiGlu failed on the device"):
        torch.npu.synchronize()
    torch.npu.synchronize()
    assert ones(2).tolist() == [1, 1]


@pytest.mark.slow(why="a process imports torch")
@pytest.mark.parametrize("options", [("--clock", "910b3"), ("--clock", "910b3", "--dry")], ids=["clock", "dry"])
def test_a_wrong_call_is_refused_in_modelled_time_too(options: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        try:
            torch.ones(1, device="npu").mul_(torch.ones(2, device="npu"))
        except RuntimeError as error:
            print("aclnnInplaceMul: output with shape [1]" in str(error))
        torch.npu.synchronize()
        mixed = torch.ones(2, device="npu", dtype=torch.bfloat16) * torch.ones(2, device="npu")
        print(mixed.shape, mixed.dtype)
        """,
    )
    done = run(*EMULATOR, *options, script, cwd=tmp_path)
    assert done.stdout.splitlines() == ["True", "torch.Size([2]) torch.float32"], done.stderr
