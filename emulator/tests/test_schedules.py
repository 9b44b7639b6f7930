"""The schedules: when operations run, and that a correct program has the same result whenever they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script

# Two streams that fill a buffer each, without torch: which of them is where shows in the bytes.
FILLS = """
    import ctypes, json, sys
    from emulator.tests.acl import Acl, byte_at
    acl = Acl()
    first, second = acl.malloc(64), acl.malloc(64)
    one, other = acl.made("aclrtCreateStream"), acl.made("aclrtCreateStream")
    history = []
    for value in range(1, 41):
        acl.check("aclrtMemsetAsync", first, 64, value, 64, one)
        acl.check("aclrtMemsetAsync", second, 64, value, 64, other)
        history.append((byte_at(first) % 0xA0, byte_at(second) % 0xA0))
    acl.check("aclrtSynchronizeDevice")
    print(json.dumps([history, byte_at(first), byte_at(second)]))
"""


def fills(tmp_path: Path, *options: str) -> list[list[int]]:
    """What both buffers held after each pair of fills, as far as the schedule had come."""
    script = write_script(tmp_path, FILLS)
    done = run(*EMULATOR, *options, script, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    history, *ends = json.loads(done.stdout)
    assert ends == [40, 40]
    return history


def test_late_runs_nothing_before_somebody_waits(tmp_path: Path) -> None:
    assert fills(tmp_path, "--schedule", "late") == [[0, 0]] * 40


def test_a_seed_gives_one_order_and_another_seed_another(tmp_path: Path) -> None:
    first = fills(tmp_path, "--schedule", "random", "--seed", "1")
    assert first == fills(tmp_path, "--schedule", "random", "--seed", "1")
    assert first != fills(tmp_path, "--schedule", "random", "--seed", "2")
    leads = {(one > other) - (one < other) for one, other in first}
    assert leads == {-1, 0, 1}, "each stream is ahead of the other at some time"


@pytest.mark.slow(why="its process polls for a second")
def test_late_runs_what_the_host_keeps_asking_for(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        value = torch.zeros(8, device="npu").add_(1)
        done = torch.npu.current_stream().record_event()
        polls = 0
        while not done.query():
            polls += 1
        print(polls > 10)
        """,
    )
    done = run(*EMULATOR, "--schedule", "late", script, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_late_runs_only_what_is_waited_for(tmp_path: Path) -> None:
    """A wait for one stream's event runs what that event needs, on other streams too, and nothing else."""
    script = write_script(
        tmp_path,
        """
        from emulator.tests.acl import Acl, byte_at
        acl = Acl()
        buffers = [acl.malloc(64) for _ in range(4)]
        needed, waiting, other = (acl.made("aclrtCreateStream") for _ in range(3))
        mark, end = acl.made("aclrtCreateEvent"), acl.made("aclrtCreateEvent")
        acl.check("aclrtMemsetAsync", buffers[0], 64, 1, 64, needed)
        acl.check("aclrtRecordEvent", mark, needed)
        acl.check("aclrtMemsetAsync", buffers[1], 64, 1, 64, needed)
        acl.check("aclrtStreamWaitEvent", waiting, mark)
        acl.check("aclrtMemsetAsync", buffers[2], 64, 1, 64, waiting)
        acl.check("aclrtRecordEvent", end, waiting)
        acl.check("aclrtMemsetAsync", buffers[3], 64, 1, 64, other)
        acl.check("aclrtSynchronizeEvent", end)
        print([byte_at(buffer) for buffer in buffers])
        """,
    )
    done = run(*EMULATOR, "--schedule", "late", script, cwd=tmp_path, pythonpath=ROOT)
    assert done.stdout == f"{[1, 0xA0, 1, 0xA0]}\n", done.stderr
