"""Each function that host memory needs of the runtime fails once: while a manager is made, in a step, at the end.

Every script leaves the runtime so little memory that one leaked region would be missed by the pool that comes last.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from emulator.tests.launch import EMULATOR, run, write_script
from tests.conftest import EMULATED, needs_npurt

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not EMULATED, reason="only the emulated runtime can be told to fail"),
    pytest.mark.slow(why="each process imports torch, and has faults"),
]

FAULTS = """
    import faulthandler, logging
    import ascend_emulator, torch
    from tests.models import is_empty, is_right_step
    from tiered_mem import TieringManager
    from tiered_mem.errors import PinningFailed

    faulthandler.dump_traceback_later(400, exit=True)
    logging.basicConfig(format="%(levelname)s %(message)s", level="WARNING")

    def manager(pin, **arguments):
        return TieringManager(policy="layer-order", device="npu", pin=pin, **{"host_bytes": "32MiB", **arguments})

    def show(what, manager):
        stats = manager.stats()
        names = ("host.source", "host.source_failures.total", "blocking.copies.total")
        print(what, *(stats[name] for name in names), sep=", ")

    def at_construction(pin, fault):
        ascend_emulator.inject(fault)
        try:
            with manager(pin) as one:
                ascend_emulator.clear_faults()
                assert is_right_step(one, "npu") and is_empty(one)
                show(f"made with {fault}", one)
        except PinningFailed as error:
            ascend_emulator.clear_faults()
            print(f"made with {fault}, {error}".replace(chr(10), " "))
        torch.npu.host_empty_cache()

    def in_a_step(pin, fault):
        with manager(pin, preallocate=False) as one:
            ascend_emulator.inject(fault)
            assert is_right_step(one, "npu")
            ascend_emulator.clear_faults()
            assert is_right_step(one, "npu") and is_empty(one)
            show(f"a step with {fault}", one)
        torch.npu.host_empty_cache()

    def at_the_end(pin, fault):
        one = manager(pin)
        assert is_right_step(one, "npu")
        ascend_emulator.inject(fault)
        try:
            one.close()
        except RuntimeError as error:
            print(f"closed with {fault}, {error}".replace(chr(10), " "))
        else:
            print(f"closed with {fault}")
        ascend_emulator.clear_faults()
        one.close()
        torch.npu.host_empty_cache()

    def all_is_back(pin):
        with manager(pin, host_bytes="32MiB") as one:
            assert one.stats()["host.reserved.current"] == 32 << 20
        print("all is back")
    """


def lines_of(tmp_path: Path, script: str) -> list[str]:
    text = dedent(FAULTS) + dedent(script)
    result = run(*EMULATOR, "--host", "33MiB", write_script(tmp_path, text), cwd=tmp_path, pythonpath=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_memory_of_the_runtime(tmp_path: Path) -> None:
    made, filled, probed, step, closed, back = lines_of(
        tmp_path,
        """
        at_construction(True, "aclrtMallocHost:1")
        at_construction(True, "aclrtMallocHost:2")
        at_construction(True, "aclrtFreeHost:1")
        in_a_step(True, "aclrtMallocHost:1")
        at_the_end(True, "aclrtFreeHost:1")
        all_is_back(True)
        """,
    )
    assert made == "made with aclrtMallocHost:1, RegisteredMemory, 0, 0"
    assert filled == "made with aclrtMallocHost:2, AclPinnedMemory, 1, 0"
    assert probed == "made with aclrtFreeHost:1, AclPinnedMemory, 0, 0"  # the small slab has stayed
    assert step == "a step with aclrtMallocHost:1, AclPinnedMemory, 1, 0"
    assert closed.startswith(
        "closed with aclrtFreeHost:1, aclrtFreeHost failed with ACL code 207002 for 32.0 MiB (33554432 bytes)"
    )
    assert back == "all is back"


@pytest.mark.parametrize(
    ("pin", "function"),
    [pytest.param("npurt", "npuHostRegister", marks=needs_npurt), ("acl-register", "aclrtHostRegisterV2")],
)
def test_memory_that_is_registered(pin: str, function: str, tmp_path: Path) -> None:
    made, filled, step, probed, closed, back = lines_of(
        tmp_path,
        f"""
        at_construction("{pin}", "aclrtHostRegister:1")
        at_construction("{pin}", "aclrtHostRegister:2")
        in_a_step("{pin}", "aclrtHostRegister:1")
        at_construction("{pin}", "aclrtHostUnregister:1")
        at_the_end("{pin}", "aclrtHostUnregister:1")
        all_is_back("{pin}")
        """,
    )
    assert made.startswith(
        f"made with aclrtHostRegister:1, no pinned host memory for npu:0: {pin}: RegisteredMemory did not give a "
        f"slab of 2.0 MiB: {function} failed with ACL code 207001"
    )
    assert filled == "made with aclrtHostRegister:2, RegisteredMemory, 1, 0"
    assert step == "a step with aclrtHostRegister:1, RegisteredMemory, 1, 0"
    assert probed == "made with aclrtHostUnregister:1, RegisteredMemory, 0, 0"
    assert closed.startswith(
        f"closed with aclrtHostUnregister:1, {function.removesuffix('V2').replace('Reg', 'Unreg')} failed"
    )
    assert back == "all is back"


def test_memory_of_torch(tmp_path: Path) -> None:
    made, filled, step, closed, back = lines_of(
        tmp_path,
        """
        at_construction("torch", "aclrtMallocHost:1")
        at_construction("torch", "aclrtMallocHost:2")
        in_a_step("torch", "aclrtMallocHost:1")
        at_the_end("torch", "aclrtFreeHost:1")
        all_is_back("torch")
        """,
    )
    assert made.startswith(
        "made with aclrtMallocHost:1, no pinned host memory for npu:0: torch: TorchPinnedMemory did not give a "
        "slab of 2.0 MiB: torch could not pin 2.0 MiB: aclrtMallocHost failed with ACL code 207001"
    )
    assert filled == "made with aclrtMallocHost:2, TorchPinnedMemory, 1, 0"
    assert step == "a step with aclrtMallocHost:1, TorchPinnedMemory, 1, 0"
    assert closed == "closed with aclrtFreeHost:1"  # torch keeps the memory, and frees it later
    assert back == "all is back"


def test_a_runtime_that_cannot_tell_whether_memory_is_pinned(tmp_path: Path) -> None:
    made, step, unpinned, back = lines_of(
        tmp_path,
        """
        at_construction(True, "aclrtPointerGetAttributes:1")
        in_a_step(True, "aclrtPointerGetAttributes:1")
        at_construction("acl", "aclrtPointerGetAttributes:1")
        all_is_back(True)
        """,
    )
    assert made == "made with aclrtPointerGetAttributes:1, RegisteredMemory, 0, 0"
    # Of both steps: what torch did not take for pinned counts as copies that blocked, whether they did or not.
    assert step == "a step with aclrtPointerGetAttributes:1, AclPinnedMemory, 0, 72"
    assert unpinned == "made with aclrtPointerGetAttributes:1, AclPinnedMemory, 0, 0"
    assert back == "all is back"


COPY = """
    with_queue = manager(True, preallocate=False)
    for attempt in range(2):
        ascend_emulator.inject("aclrtMemcpyBatchAsync:1") if attempt == 0 else ascend_emulator.clear_faults()
        try:
            print(is_right_step(with_queue, "npu"))
        except RuntimeError as error:
            print("aclrtMemcpyBatchAsync" in str(error) or "AclrtMemcpyBatchAsync" in str(error))
    for attempt in range(2):
        try:
            with_queue.close()
            print("closed")
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}")
    """


def test_a_copy_that_fails_is_an_error_and_no_hang(tmp_path: Path) -> None:
    script = write_script(tmp_path, dedent(FAULTS) + dedent(COPY))
    results = [
        run(*EMULATOR, "--host", "33MiB", script, cwd=tmp_path, pythonpath=ROOT, TASK_QUEUE_ENABLE=queue)
        for queue in "01"
    ]
    assert [result.returncode for result in results] == [0, 0], "".join(result.stderr for result in results)
    plain, queued = (result.stdout.splitlines() for result in results)
    assert plain == ["True", "True", "closed", "closed"]
    # torch_npu's queue drops everything after a failure, of which it tells once. Nothing can be right after that.
    told, right, *closed = queued
    assert told == "True"
    assert right == "False"
    # How many depends on when the calling thread heard of it.
    assert all(re.match(r"DeviceFailed: \d+ copies of host memory were dropped", line) for line in closed), closed
