"""A device, a drive or a library with a fault: the right line fails and says why, and no other blames another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.check.conftest import Lines
from tests.conftest import EMULATED

pytestmark = [
    pytest.mark.slow(why="each is a whole run of the command, a quarter of a minute"),
    pytest.mark.once(why="the device is one of its own"),
]
on_emulator = pytest.mark.skipif(not EMULATED, reason="only the emulated device can be told to go wrong")

# The options of the emulator, the line that fails, and what it says.
DEVICES = {
    "no source is taken for pinned": (
        ("--fault", "unpinned:p=1"),
        "pinned memory",
        "torch takes no host memory for pinned, and would wait at each copy: acl: not recognised; npurt: not",
    ),
    "pinned memory is refused": (
        ("--host", "1MiB"),
        "pinned memory",
        "aclrtMallocHost failed with ACL code 207001",
    ),
    "an event that does not order": (
        ("--fault", "lost_wait:p=1"),
        "events order streams",
        " stream that waited for an event read before it, ",
    ),
    "wrong bytes to the host": (
        ("--fault", "copy_d2h:p=1"),
        "bytes to the host",
        "after copy 1 to the host 1 of 4194304 numbers are wrong, the first at 0",
    ),
    "wrong bytes to the device, once": (
        ("--fault", "copy_h2d:3"),
        "bytes to the device",
        "after copy 3 to the device 1 of 4194304 numbers there are wrong, the first at 0",
    ),
    "a copy to the device that comes late": (
        ("--fault", "late_h2d:p=1"),
        "a stream waits for a copy",
        "the stream that waited for a copy to the device read before its end, 50 of 50 times",
    ),
    "memory that is reused before its copy has read it": (
        ("--fault", "late_d2h:p=1"),
        "a release waits for its copy",
        "memory was written again before its copy to the host had read it, in 48 of 48 copies",
    ),
    "synchronous copies to the host": (
        ("--fault", "blocking_d2h:p=1"),
        "asynchronous to the host",
        " times of 7: the copy blocks the queue of work",
    ),
    "synchronous copies to the device": (
        ("--fault", "blocking_h2d:p=1"),
        "asynchronous to the device",
        " times of 7: the copy blocks the queue of work",
    ),
    "an operator that comes to other bits": (
        ("--fault", "aclnnGeluV2:p=0.3"),
        "a training repeats itself",
        "the device, without the library, comes to other numbers the second time: the ",
    ),
    "a copy to the host that never ends": (
        ("--fault", "endless_d2h:2"),
        "bytes to the host",
        "it did not end within 20 s, and was killed",
    ),
    "a copy to the device that never ends": (
        ("--fault", "endless_h2d:2"),
        "bytes to the device",
        "it did not end within 20 s, and was killed",
    ),
}


@on_emulator
@pytest.mark.parametrize("fault", DEVICES)
def test_a_fault_of_the_device(check_on_emulator: Callable[..., tuple[int, Lines]], fault: str) -> None:
    options, name, words = DEVICES[fault]
    status, lines = check_on_emulator(*options, limit="20" if "never ends" in fault else "60")
    assert words in lines.only_failed(name)
    assert status == 1


@on_emulator
def test_copies_that_fail(check_on_emulator: Callable[..., tuple[int, Lines]]) -> None:
    """Each way by itself: after a failure the next check has a process of its own."""
    _, lines = check_on_emulator("--fault", "aclrtMemcpyBatchAsync:p=1")
    reason = lines.only_failed("bytes to the host", "bytes to the device")
    assert "the current working operator name is aclrtMemcpyBatchAsync" in reason


@on_emulator
def test_a_library_that_does_not_wait(check_with_faults: Callable[..., Lines]) -> None:
    lines = check_with_faults("lost hold", "npu")
    reason = lines.only_failed("a stream waits for a copy", "a release waits for its copy")
    assert "read before its end" in reason


# The fault of the drive, and what the line of its records says, as a regular expression.
DRIVES = {
    "wrong bytes": r"reading in .* failed: .* of '?check'?: expected \w+, found ",
    "EIO": r"\[Errno 5\] Input/output error",
    "ENOSPC": r"\[Errno 28\] No space left on device",
    "no end": "it did not end within 10 s, and was killed",
    "death": "the process ended by signal SIGABRT: the driver says why",
}


@pytest.mark.parametrize("fault", DRIVES)
def test_a_fault_of_the_drive(check_with_faults: Callable[..., Lines], fault: str, tmp_path: Path) -> None:
    lines = check_with_faults(fault, "cpu", limit=10 if fault == "no end" else 60)
    assert re.search(DRIVES[fault], lines.only_failed("records on the drive"))
    resting = {name for name, line in lines.items() if line.verdict == "not run"}
    assert {"damage is found", "disk spill", "optimizer on disk"} <= resting
    assert lines["offload"].verdict == "pass"
    assert list(tmp_path.rglob("*")) == [], "what was killed has left it"


def test_a_device_that_does_not_begin_again(check_with_faults: Callable[..., Lines]) -> None:
    """What needs it fails for that, at once, and what was found before is told."""
    lines = check_with_faults("no second start", "cpu")
    assert "[Errno 5]" in lines["records on the drive"].reason
    failed = lines["a training repeats itself"]
    assert (failed.verdict, failed.reason) == (
        "fail",
        "no process began after the failure before: torch and the device do not begin: the process ended with "
        "status 1: the device does not answer",
    )
