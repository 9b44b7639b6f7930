"""Under each policy a model's blocks move as they did before.

Who means to change that writes the records anew: python -m ascend_emulator -m tests.moves
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.moves.record import POLICIES, file_of, moves_of


@pytest.mark.parametrize("name", POLICIES)
def test_the_moves_are_those_of_before(name: str, device: str, tmp_path: Path) -> None:
    if device == "cpu" and POLICIES[name][1] is None:
        pytest.skip("the CPU has one stream, which waits for itself")
    assert moves_of(name, device, tmp_path) == file_of(name).read_text().splitlines()
