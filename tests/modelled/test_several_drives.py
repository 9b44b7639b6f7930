"""Two modelled drives beside one, by the modelled clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.test_modelled_drives import SCHEDULES, output_of
from emulator.tests.timed import machine
from tests.modelled.test_modelled_drives import TRAINING, offer

# The same records to as many drives, all in flight at once, and back; and the rates that a plan is made with.
RATES = """
    import json
    from contextlib import closing
    from pathlib import Path

    import ascend_emulator
    from tests.spill.memory import Memory, empty
    from tiered_mem.spill.chosen import tier_in
    from tiered_mem.tiers.measure import measured_tier

    MIB, RECORDS = 1 << 20, 24

    def moved(count):
        paths = [f"spill-{count}-{number}" for number in range(count)]
        for path in paths:
            Path(path).mkdir()
        with closing(tier_in(paths, capacity=512 * MIB)) as tier:
            memory, back = Memory(bytes(MIB)), [empty(MIB) for _ in range(RECORDS)]
            times = [ascend_emulator.now()]
            records = [tier.write([memory.piece()], step=0, kind="test") for _ in range(RECORDS)]
            assert all(record.job.wait() and record.job.error is None for record in records)
            times.append(ascend_emulator.now())
            jobs = [tier.read(record, [(0, to.ptr)]) for record, to in zip(records, back)]
            assert all(job.wait() and job.error is None for job in jobs)
            times.append(ascend_emulator.now())
            for record in records:
                tier.release(record)
            link = measured_tier(tier, 32 * MIB * count)
        return {"write": times[1] - times[0], "read": times[2] - times[1], "out": link.out, "back": link.back}

    with ascend_emulator.record_timeline() as spans:
        said = {count: moved(count) for count in (1, 2, 3)}
    print(json.dumps({"moved": said, "spans": [[span.device, span.start, span.end] for span in spans]}))
"""


def test_two_drives_take_nearly_twice_the_records(tmp_path: Path) -> None:
    """And so three, and a plan is made with that rate."""
    offer(tmp_path)
    said = json.loads(output_of(tmp_path, RATES, *machine(tmp_path), "--dry"))
    print(json.dumps(said["moved"], indent=1))
    one, two, three = (said["moved"][count] for count in "123")
    for way in ("write", "read"):
        assert one[way] / two[way] >= 1.8
        assert one[way] / three[way] >= 2.6
    for rate in ("out", "back"):
        assert two[rate] / one[rate] >= 1.8
        assert three[rate] / one[rate] >= 2.6
    spans = {device: [times for at, *times in said["spans"] if at == device] for device in (-1, -2, -3)}
    assert all(spans.values())
    for each in spans.values():
        assert all(start >= end for (_, end), (start, _) in pairwise(each)), "one at a time"


def train(folder: Path, *options: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    offer(folder)
    for number in range(2):
        (folder / f"drive-{number}").mkdir()
    text = TRAINING.replace('"spill_dir": "spill"', '"spill_dir": ["drive-0", "drive-1"]')
    assert text != TRAINING
    said: dict[str, Any] = json.loads(output_of(folder, text, *machine(folder), *options))
    return said


@pytest.mark.slow(why="processes train a model")
def test_a_training_over_two_drives_has_the_plain_ones_numbers_in_each_schedule(tmp_path: Path) -> None:
    trained = train(tmp_path / "eager")
    assert trained["equal"]
    used = {device for _, device, *_ in trained["spans"] if device < 0}
    assert used == {-1, -2}
    for number, options in enumerate(SCHEDULES):
        assert train(tmp_path / f"{number}", *options) == trained
