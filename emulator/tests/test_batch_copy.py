"""torch._foreach_copy_ between host and device, which copies many pairs by one call of CANN."""

from __future__ import annotations

import time
from pathlib import Path

import ascend_emulator
import pytest
import torch
from ascend_emulator import clear_races, host_access, races

from emulator.tests.emulated_device import RACES, Link
from emulator.tests.launch import EMULATOR, run, write_script
from emulator.tests.racing_streams import current, side_stream

MB = 1_000_000

watched = pytest.mark.skipif(not RACES, reason="needs the race detector (ASCEND_EMULATOR_RACES=1)")


class Slabs:
    """A pinned and a device slab, and in each a view of every size, with a gap of one element after each view."""

    SIZES = (1, 3, 7, 64, 1000, 4097, 70_001)

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> None:
        count = sum(sizes) + len(sizes)
        self.host = _numbers(count, dtype).pin_memory()
        self.device = _numbers(count, dtype).npu()
        self.on_host, self.on_device = self._views(self.host, sizes), self._views(self.device, sizes)

    @staticmethod
    def _views(slab: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        starts = [sum(sizes[:i]) + i for i in range(len(sizes))]
        return [slab[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def copy(self, direction: str, *, non_blocking: bool = True) -> None:
        to, of = (self.on_device, self.on_host) if direction == "h2d" else (self.on_host, self.on_device)
        torch._foreach_copy_(to, of, non_blocking=non_blocking)


def _numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randint(0, 100, (count,))
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_every_pair_arrives_and_nothing_beside_it_changes(
    direction: str, dtype: torch.dtype, non_blocking: bool
) -> None:
    slabs = Slabs(dtype)
    before = {"h2d": slabs.device.cpu(), "d2h": slabs.host.clone()}[direction]
    source = {"h2d": slabs.host.clone(), "d2h": slabs.device.cpu()}[direction]
    slabs.copy(direction, non_blocking=non_blocking)
    torch.npu.synchronize()
    after = slabs.device.cpu() if direction == "h2d" else slabs.host
    gaps = torch.tensor([sum(Slabs.SIZES[: i + 1]) + i for i in range(len(Slabs.SIZES))])
    expected = source.index_copy(0, gaps, before[gaps])
    assert after.equal(expected)


def test_pairs_of_several_dtypes_and_shapes_go_together() -> None:
    sources = [torch.rand(3, 5), torch.arange(7), torch.rand(2, 2, 2).bfloat16(), torch.tensor(5.0)]
    on_host = [source.pin_memory() for source in sources]
    on_device = [torch.zeros_like(source, device="npu") for source in sources]
    back = [torch.zeros_like(source).pin_memory() for source in sources]
    torch._foreach_copy_(on_device, on_host, non_blocking=True)
    torch._foreach_copy_(back, on_device, non_blocking=True)
    torch.npu.synchronize()
    assert all(here.equal(there) for here, there in zip(back, sources, strict=True))


@pytest.mark.schedules("eager", why="what runs beside what is the schedule's choice")
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_the_call_returns_at_once_and_the_pairs_share_the_link(link: Link, direction: str) -> None:
    slabs = Slabs(sizes=(MB // 4,) * 8)
    stream = torch.npu.Stream()
    torch.npu.synchronize()
    link("20MB/s")
    start = time.perf_counter()
    with torch.npu.stream(stream):
        slabs.copy(direction)
    assert not stream.query()
    stream.synchronize()
    assert time.perf_counter() - start >= 0.4
    assert all(here.equal(there.cpu()) for here, there in zip(slabs.on_host, slabs.on_device, strict=True))


def test_a_batch_keeps_its_place_on_the_stream(link: Link) -> None:
    link("100MB/s")
    slabs = Slabs(sizes=(MB // 8,) * 4)
    slabs.host.fill_(3)
    stream = side_stream()
    with torch.npu.stream(stream):
        slabs.device.zero_()
        slabs.copy("h2d")
        slabs.device.mul_(2)
        slabs.copy("d2h")
        slabs.device.zero_()
    stream.synchronize()
    assert [view.unique().tolist() for view in slabs.on_host] == [[6.0]] * 4


def test_an_event_behind_a_batch_stands_for_all_its_pairs(link: Link) -> None:
    link("50MB/s")
    slabs = Slabs(sizes=(MB // 8,) * 4)
    slabs.host.fill_(3)
    side = side_stream()
    with torch.npu.stream(side):
        slabs.copy("h2d")
        landed = side.record_event()
    current().wait_event(landed)
    doubled = [view * 2 for view in slabs.on_device]
    assert [view.unique().tolist() for view in doubled] == [[6.0]] * 4


def test_the_timeline_shows_each_pair() -> None:
    slabs = Slabs()
    side = side_stream()
    with torch.npu.stream(side), ascend_emulator.record_timeline() as spans:
        slabs.copy("h2d")
        slabs.copy("d2h")
        side.synchronize()
    nbytes = [4 * size for size in Slabs.SIZES]
    assert [(span.name, span.nbytes) for span in spans] == [
        *(("copy_h2d", each) for each in nbytes),
        *(("copy_d2h", each) for each in nbytes),
    ]
    assert len({span.stream for span in spans}) == 1
    times = [moment for span in spans for moment in (span.start, span.end)]
    assert times == sorted(times)


@watched
def test_a_batch_that_does_not_wait_for_its_producer_is_reported() -> None:
    for right in (True, False):
        slabs, side = Slabs(), side_stream()
        slabs.on_device[3].mul_(2)
        if right:
            side.wait_stream(current())
        with torch.npu.stream(side):
            slabs.copy("d2h")
        current().wait_stream(side)
        torch.npu.synchronize()
        found = races()
        clear_races()
        assert [(race.first.operation, race.second.operation) for race in found] == (
            [] if right else [("aclnnInplaceMuls", "copy_d2h")]
        )
    [race] = found
    assert (race.second.touch, race.second.begin, race.second.nbytes) == (
        *("read", slabs.on_device[3].data_ptr(), slabs.on_device[3].nbytes),
    )
    assert race.second.stack[-1].line.startswith("torch._foreach_copy_(")


@watched
def test_a_pair_that_is_used_before_it_arrived_is_reported() -> None:
    for right in (True, False):
        slabs, side = Slabs(), side_stream()
        with torch.npu.stream(side):
            slabs.copy("h2d")
        if right:
            current().wait_stream(side)
        doubled = slabs.on_device[5] * 2
        current().wait_stream(side)
        torch.npu.synchronize()
        found = races()
        clear_races()
        assert [(race.first.operation, race.second.operation) for race in found] == (
            [] if right else [("copy_h2d", "aclnnMuls")]
        )
        del doubled
    [race] = found
    assert (race.first.touch, race.first.begin, race.first.nbytes) == (
        *("write", slabs.on_device[5].data_ptr(), slabs.on_device[5].nbytes),
    )


@watched
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_the_host_side_of_a_pair_is_watched_and_the_gap_beside_it_is_not(direction: str) -> None:
    slabs = Slabs()
    torch.npu.synchronize()
    slabs.copy(direction)
    view = slabs.on_host[2]
    with host_access(view.data_ptr() + view.nbytes, 4, write=True):  # the gap
        pass
    assert races() == []
    with host_access(view.data_ptr(), 4, write=True):
        pass
    found = races()
    clear_races()
    torch.npu.synchronize()
    assert [(race.first.operation, race.first.nbytes) for race in found] == [(f"copy_{direction}", view.nbytes)]


ATTEMPTS = """
    import torch
    from ascend_emulator import clear_faults, inject

    on_host = [torch.full((size,), 3.0).pin_memory() for size in (5, 1000, 1)]
    on_device = [torch.zeros(size, device="npu") for size in (5, 1000, 1)]

    def attempt(fault, to, of, non_blocking=True):
        inject(fault)
        told = []
        for _ in range(3):
            try:
                torch._foreach_copy_(to, of, non_blocking=non_blocking)
                torch.npu.synchronize()
            except RuntimeError as error:
                told.append("507000" if "507000" in str(error) else str(error))
            else:
                told.append("well")
        clear_faults()
        print(fault, *told)
"""


@pytest.mark.slow(why="a process imports torch")
@pytest.mark.parametrize("stack", ["current", "old"])
def test_one_call_of_torch_is_one_call_of_cann_and_a_loop_on_an_old_stack(tmp_path: Path, stack: str) -> None:
    script = write_script(
        tmp_path,
        ATTEMPTS
        + """
    attempt("aclrtMemcpyBatchAsync:2", on_device, on_host)
    attempt("aclrtMemcpyBatchAsync:2", on_host, on_device)
    attempt("aclrtMemcpyAsync:2", on_device, on_host)
    attempt("aclrtMemcpyBatch:2", on_device, on_host, non_blocking=False)
    print(*(tensor.unique().tolist() for tensor in on_device))
    """,
    )
    done = run(*EMULATOR, "--stack", stack, script, cwd=tmp_path, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    batch, loop = ("well 507000 well", "well well well"), ("well well well", "507000 well well")
    asynchronous, single = batch if stack == "current" else loop
    assert done.stdout.splitlines() == [
        f"aclrtMemcpyBatchAsync:2 {asynchronous}",
        f"aclrtMemcpyBatchAsync:2 {asynchronous}",
        f"aclrtMemcpyAsync:2 {single}",
        "aclrtMemcpyBatch:2 well 507000 well",  # CANN 8.2 has this one
        "[3.0] [3.0] [3.0]",
    ]


@pytest.mark.slow(why="a process imports torch")
def test_a_batch_that_fails_in_torch_npus_queue_is_told_at_the_next_synchronisation(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        ATTEMPTS
        + """
    inject("aclrtMemcpyBatchAsync:1")
    torch._foreach_copy_(on_device, on_host, non_blocking=True)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        print("aclrtMemcpyBatchAsync" in str(error))
    """,
    )
    done = run(*EMULATOR, script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
