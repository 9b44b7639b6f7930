"""Ranks whose copies share the memory of one host, in modelled time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import SERVER, machine

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

Said = dict[str, list[Any]]

# One card alone gets 20 GB/s to the host and 10 GB/s back, and each half and three quarters of that at once.
SHARED = SERVER + "[host_memory]\nbytes_per_s = 24e9\n"
SCRIPT = """
    import json, sys
    from emulator.tests.hccl_copies import run_all
    print(json.dumps(run_all(int(sys.argv[1]))))
"""


def run_programs(folder: Path, ranks: int, *options: str, server: str = SHARED) -> Said:
    script = write_script(folder, SCRIPT)
    emulator = (*EMULATOR, *machine(folder, server), "--devices", str(ranks), "--dry", *options)
    done = run(*emulator, script, str(ranks), cwd=folder, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: Said = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs(tmp_path_factory.mktemp("two"), 2)


def lasted(rank: Any) -> list[float]:
    """The microseconds of its copies: 6, and their bytes."""
    return [round(end - begin, 1) for name, begin, end in rank[1] if name.startswith("copy_")]


def test_ranks_that_copy_at_once_have_the_host_memory_in_equal_parts(said: Said) -> None:
    # 20 GB/s where nothing is known of the others; then 12, of 24.
    assert [lasted(rank) for rank in said["all_copy"]] == [[5006.0, 8339.3, 8339.3]] * 2


def test_a_rank_that_copies_alone_has_its_whole_link(said: Said) -> None:
    first, second = map(lasted, said["one_copies"])
    assert first == [5006.0] * 3
    assert second == [6.0] * 3


def test_a_rank_gets_more_when_others_cease(said: Said) -> None:
    first = lasted(said["others_cease"][0])
    assert first[1] == 8339.3
    assert first[1:] == sorted(first[1:], reverse=True)
    assert first[-1] == 5006.0


def test_a_copy_that_goes_on_is_slowed_when_it_is_told_of_others(said: Said) -> None:
    ((_, first), (_, second)) = said["in_the_middle"]
    assert first == second
    begin, end = next(span[1:] for span in first if span[0] == "copy_d2h")
    told = next(span[2] for span in first if span[0] == "HcclAllReduce")
    left = 100e6 - (told - begin - 6) * 20e3
    assert end == pytest.approx(told + left / 12e3, abs=0.01)


def test_both_directions_count(said: Said) -> None:
    # Together two ranks ask for 2 x (5 + 15) GB/s while both go on. The longer one then goes on with 10.
    down, up = lasted(said["both_ways"][0])[-2:]
    assert down == pytest.approx(6 + 100e6 / (15e3 * 24 / 40), abs=30)
    assert up == pytest.approx(down + (100e6 - (down - 6) * 5e3 * 24 / 40) / 10e3, abs=30)


def test_without_a_rate_cards_do_not_slow_each_other(tmp_path: Path) -> None:
    for rank in run_programs(tmp_path, 2, server=SERVER)["all_copy"]:
        assert lasted(rank) == [5006.0] * 3


@pytest.mark.slow(why="two more runs; what schedules do to the clock is seen in test_hccl_clock.py")
def test_the_option_sets_the_rate_and_two_runs_tell_the_same_nanoseconds(tmp_path: Path) -> None:
    once = run_programs(tmp_path, 4, "--host-memory", "16GB/s")
    assert [lasted(rank) for rank in once["all_copy"]] == [[6256.0, 25006.0, 25006.0]] * 4
    assert run_programs(tmp_path, 4, "--host-memory", "16GB/s") == once
