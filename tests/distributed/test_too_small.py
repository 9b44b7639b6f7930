"""Where the budget of one rank is too small, all ranks end after one step, with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import said_to_torchrun

WORKER = ("-m", "tests.distributed.too_small")


@pytest.mark.parametrize(
    ("ranks", "small", "ways"),
    [
        (2, 1, ("fsdp2", "1F1B")),  # for the last rank of which each micro-batch is a step
        (4, 1, ("zero bubble",)),
    ],
    ids=str,
)
def test_all_ranks_end_with_one_sentence(ranks: int, small: int, ways: tuple[str, ...], tmp_path: Path) -> None:
    lines = said_to_torchrun(tmp_path, ranks, (), *WORKER, str(small), *ways)
    for way in ways:
        (sentence,) = {line[way]["said"] for line in lines}
        assert f"all ranks of this machine end here: the budget of rank {small} (process " in sentence
        # No rank has waited in vain, and the one whose budget it is has said more.
        assert [len(line[way]["logged"]) for line in lines] == [int(rank == small) for rank in range(ranks)]
