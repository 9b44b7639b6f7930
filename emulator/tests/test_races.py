"""The race detector: it names every wrong program and no right one, in whatever schedule the tests run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ascend_emulator import clear_races, host_access, races

from emulator.tests.emulated_device import RACES
from emulator.tests.launch import EMULATOR, run, write_script
from emulator.tests.racing_graphs import GRAPH_PROGRAMS
from emulator.tests.racing_memory import MEMORY_PROGRAMS
from emulator.tests.racing_reuse import REUSE_PROGRAMS, handed_out_again
from emulator.tests.racing_streams import NBYTES, STREAM_PROGRAMS, N, current, ones, pinned, side_stream

PROGRAMS = STREAM_PROGRAMS | MEMORY_PROGRAMS | REUSE_PROGRAMS | GRAPH_PROGRAMS

watched = pytest.mark.skipif(not RACES, reason="needs the race detector (ASCEND_EMULATOR_RACES=1)")


def run_program(name: str, right: bool) -> None:
    torch.npu.synchronize()
    torch.npu.empty_cache()  # so that the program is given again what it has dropped, and not what another one has
    clear_races()
    PROGRAMS[name](right)
    torch.npu.synchronize()


@watched
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrong_program_is_reported(name: str) -> None:
    run_program(name, right=False)
    found = races()
    clear_races()
    assert found, "no race was found"
    stacks = [side.stack for race in found for side in (race.first, race.second)]
    assert any(Path(frame.filename).name.startswith("racing_") for stack in stacks for frame in stack)


@watched
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_is_not(name: str) -> None:
    run_program(name, right=True)
    assert races() == []


@watched
def test_a_race_names_both_sides() -> None:
    run_program("reload_used_before_it_arrived", right=False)
    [race] = races()
    clear_races()
    assert (race.first.operation, race.first.touch) == ("copy_h2d", "write")
    assert (race.second.operation, race.second.touch) == ("aclnnMuls", "read")
    assert race.first.stream != race.second.stream
    assert race.first.begin == race.second.begin
    assert race.first.nbytes == race.second.nbytes == NBYTES
    assert race.count == 1
    lines = [side.stack[-1].line for side in (race.first, race.second)]
    assert lines == ["target.copy_(host, non_blocking=True)", "doubled = target * 2"]
    text = str(race)
    assert "copy_h2d" in text
    assert f"writes {NBYTES} bytes" in text
    assert "doubled = target * 2" in text


@watched
def test_a_race_in_a_loop_is_one_race() -> None:
    target, side = ones(), side_stream()
    for _ in range(10):
        with torch.npu.stream(side):
            target.add_(1)
        torch.npu.synchronize()
        target.mul_(2)
        with torch.npu.stream(side):
            target.add_(1)
        torch.npu.synchronize()
    found = races()
    clear_races()
    assert [race.count for race in found] == [10]


@watched
def test_the_calls_of_a_line_are_one_place() -> None:
    first, second, side = ones(), ones(), side_stream()
    with torch.npu.stream(side):
        _ = first.add_(1), second.add_(1)
    _ = first.mul_(2), second.mul_(2)
    torch.npu.synchronize()
    found = races()
    clear_races()
    assert [race.count for race in found] == [2]


@watched
@pytest.mark.parametrize("halves", [(slice(0, N // 2), slice(N // 2, N)), (slice(N // 2, N), slice(0, N // 2))])
def test_an_event_covers_what_was_written_before_it_and_no_more(halves: tuple[slice, slice]) -> None:
    target, side = ones(), side_stream()
    before, after = halves
    with torch.npu.stream(side):
        target.mul_(2)
        event = side.record_event()
        target[after].zero_()
    torch.npu.current_stream().wait_event(event)
    target[before].add_(1)
    assert races() == []
    target[after].add_(1)
    found = races()
    clear_races()
    torch.npu.synchronize()
    assert [race.first.operation for race in found] == ["aclnnInplaceZero"]


@watched
def test_the_bytes_beside_those_that_are_overwritten_are_still_raced_for() -> None:
    target, side = ones(), side_stream()
    target.mul_(2)
    target[: N // 2].zero_()
    with torch.npu.stream(side):
        target[N // 2 :].add_(1)
    found = races()
    clear_races()
    torch.npu.synchronize()
    assert [(race.first.operation, race.second.nbytes) for race in found] == [("aclnnInplaceMuls", NBYTES // 2)]


@watched
def test_the_host_is_not_on_any_stream() -> None:
    run_program("host_buffer_read_before_synchronising", right=False)
    race = races()[0]
    clear_races()
    assert (race.second.operation, race.second.stream) == ("aten::sum", None)


@watched
def test_what_has_been_freed_and_torn_down_is_forgotten() -> None:
    """Addresses come again; what was there before has nothing to do with it."""
    for _ in range(3):
        tensor = torch.ones(8 << 20, device="npu")
        with torch.npu.stream(side_stream()):
            tensor.sum()
        torch.npu.synchronize()
        del tensor
        torch.npu.empty_cache()
    assert races() == []


def asks_for_the_place(call: Callable[[], object]) -> bool:
    """Whether the detector runs Python in it, to know where the program is."""
    files: set[str] = set()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    call()
    sys.setprofile(None)
    return inspect.getfile(races) in files


@watched
def test_no_python_runs_where_memory_is_freed() -> None:
    """It could collect garbage, and so free a tensor while torch's allocator is at work on another.

    Two blocks side by side would each be joined with the other, and their addresses handed out twice.
    """
    tensors = [ones(), pinned()]
    tensors[0].untyped_storage()  # its Python object goes with it, so Python's lock is held where torch frees it
    torch.npu.synchronize()
    for free in (tensors.clear, torch.npu.empty_cache, torch.npu.host_empty_cache):
        assert not asks_for_the_place(free), free
    assert asks_for_the_place(ones)


@watched
def test_a_race_for_reused_memory_says_that_it_was_freed_between() -> None:
    run_program("freed_while_it_is_offloaded", right=False)
    [race] = races()
    clear_races()
    assert (race.first.operation, race.first.touch) == ("copy_d2h", "read")
    assert (race.second.operation, race.second.touch) == ("aclnnInplaceZero", "write")
    assert race.freed is not None
    assert (race.freed.operation, race.freed.begin, race.freed.nbytes) == ("free", race.first.begin, NBYTES)
    assert "The memory was given to another tensor in between:\nfree on stream" in str(race)
    run_program("reload_used_before_it_arrived", right=False)
    [race] = races()
    clear_races()
    assert race.freed is None
    assert "in between" not in str(race)


@watched
def test_poison_waits_for_the_last_use_of_the_memory() -> None:
    """Which is ordered before the next one, and not before the memory was taken back."""
    torch.npu.empty_cache()
    side = side_stream()
    with torch.npu.stream(side):
        first = torch.full((N,), 3.0, device="npu")
    address = first.data_ptr()
    current().wait_stream(side)
    for _ in range(8):
        first.mul_(2)
    total = first.sum()
    del first
    with torch.npu.stream(side):
        second = handed_out_again(address)
        assert second.data_ptr() == address
        side.synchronize()  # in every schedule, what the side stream was given has run by now
    assert total.item() == 3.0 * 2**8 * N
    side.wait_stream(current())
    with torch.npu.stream(side):
        assert second.isnan().all()


@watched
def test_memory_that_torch_took_back_is_poisoned() -> None:
    doomed = ones()
    address = doomed.data_ptr()
    del doomed
    reborn = torch.empty(N, device="npu")
    assert reborn.data_ptr() == address
    assert reborn.isnan().all()


@pytest.mark.slow(why="a process imports torch")
def test_without_the_detector_a_declaration_does_nothing_and_asking_is_an_error(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch, ascend_emulator
        host = torch.zeros(8).pin_memory()
        with ascend_emulator.host_access(host.data_ptr(), 32, write=True):
            pass
        try:
            ascend_emulator.races()
        except ascend_emulator.EmulatorError as error:
            print(error)
        """,
    )
    done = run(*EMULATOR, script, cwd=tmp_path)
    assert done.stdout == "the race detector is off; start with races=True (--races)\n", done.stderr


def test_without_a_device_a_declaration_does_nothing_either(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ascend_emulator
        with ascend_emulator.host_access(4096, 32, write=True):
            print("used")
        """,
    )
    done = run(script, cwd=tmp_path)
    assert done.stdout == "used\n", done.stderr


@watched
def test_a_declaration_may_say_anything() -> None:
    host = torch.zeros(N).pin_memory()
    torch.ones(N, device="npu").copy_(host, non_blocking=True)
    with host_access(host.data_ptr(), NBYTES, write=True, what='a "file" of C:\\ é\n'):
        pass
    found = races()
    clear_races()
    torch.npu.synchronize()
    assert found[0].second.operation == 'a "file" of C:\\ é '


@watched
def test_declared_uses_of_unpinned_memory_are_not_the_detectors() -> None:
    plain = torch.zeros(N)
    with host_access(plain.data_ptr(), NBYTES, write=True):
        torch.ones(N, device="npu").copy_(plain)
    assert races() == []
