"""What this device cannot do, and torch_npu can be told to: the device stays good for all else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_npu  # type: ignore[import-untyped]

from emulator.tests.launch import EMULATOR, run, write_script


@pytest.fixture
def jit_compile() -> Iterator[None]:
    torch.npu.set_compile_mode(jit_compile=True)
    yield
    torch.npu.set_compile_mode(jit_compile=False)


def test_operators_run_with_jit_compile(jit_compile: None) -> None:
    half = torch.ones(3, device="npu").to(torch.float16) / 2
    assert half.abs().tolist() == [0.5, 0.5, 0.5]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch_npu then tells what operators do, not what was set")
def test_a_program_sees_the_jit_compile_that_it_has_set(jit_compile: None) -> None:
    assert not torch.npu.is_jit_compile_false()


def test_a_call_that_needs_the_older_interface_fails_alone() -> None:
    private = torch_npu.unsafe_empty_with_format((4, 4), device="npu", acl_format=29, keep_format=True)
    with pytest.raises(RuntimeError, match="older interface, aclop"):
        private.copy_(torch.ones(4, 4, device="npu"))
    assert torch.ones(2, device="npu").tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_are_copied_and_cast(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[1, 2], [3, 60000]]).to(dtype).npu()
    assert numbers.cpu().tolist() == [[1, 2], [3, 60000]]
    assert numbers.float().tolist() == [[1, 2], [3, 60000]]
    assert numbers.float().to(dtype).t().contiguous().cpu().tolist() == [[1, 3], [2, 60000]]


@pytest.mark.slow(why="a process imports torch")
def test_saturation_mode_changes_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        large = torch.full((2,), 60000.0).half().npu()
        print((large + large).tolist(), torch.ones(1).npu().tolist())
        """,
    )
    done = run(*EMULATOR, script, cwd=tmp_path, INF_NAN_MODE_FORCE_DISABLE="1")
    assert done.stdout == "[inf, inf] [1.0]\n", done.stderr
