"""What one rank of a pipeline does in a step, as it was recorded with all that is saved kept on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from tiered_mem.policies.planning.profile import Profile
from tiered_mem.policies.planning.recording import Name
from tiered_mem.policies.planning.stitching import RecordedStep, Way

_KEEPS = "keeps"  # of the ways to treat layers, None, which is no name in JSON


@dataclass(frozen=True)
class Act:
    """A forward of a stage for a microbatch, or a backward of it, or a part of that.

    kind: "F"; "B", a whole backward, or "I" and "W", its parts for inputs and for weights.
    begin, end: seconds from the step's first position. first: the first position that comes in it.
    """

    kind: str
    stage: int
    batch: int
    begin: float
    end: float
    first: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class RankStep:
    """acts: in the rank's order. steps: the step with all layers treated in each way that there is for them.

    The times of acts are those of the step that keeps all.
    """

    acts: Sequence[Act]
    steps: Mapping[Way, RecordedStep]

    def write(self, path: Path) -> None:
        steps = {_KEEPS if way is None else way: _told(step) for way, step in self.steps.items()}
        path.write_text(json.dumps({"acts": [asdict(act) for act in self.acts], "steps": steps}))

    @classmethod
    def read(cls, path: Path) -> RankStep:
        found = json.loads(path.read_text())
        acts = [Act(**act) for act in found["acts"]]
        return cls(
            acts, {cast(Way, None if way == _KEEPS else way): _step(each) for way, each in found["steps"].items()}
        )


def in_a_row(steps: Sequence[tuple[float, RecordedStep]]) -> RecordedStep:
    """Several steps as one, each with the seconds at which it begins. Their graphs are counted on."""
    names: list[Name] = []
    blocks: list[Name] = []
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(Profile)}
    graphs = 0
    for n, (begin, step) in enumerate(steps):
        profile = step.profile
        seconds = list(profile.seconds)
        if n + 1 < len(steps):
            seconds[-1] = max(0.0, steps[n + 1][0] - begin - sum(seconds[:-1]))
        loose = profile.loose or [saved + 1 for saved in profile.saved]
        for column in ("saved", "used", "dropped", "backward"):
            columns[column] += [len(names) + k for k in getattr(profile, column)]
        columns["loose"] += [len(names) + k for k in loose]
        columns["seconds"] += seconds
        for column in ("unmovable", "standing", "nbytes"):
            columns[column] += getattr(profile, column)
        names += [_counted_on(name, graphs) for name in step.names]
        blocks += [(name[0] + graphs, *name[1:]) for name in step.blocks]
        graphs += 1 + max((name[1] for name in step.names if name[0] == "begin"), default=-1)
    return RecordedStep(names, blocks, Profile(**columns))


def _counted_on(name: Name, graphs: int) -> Name:
    if name[0] in ("used", "dropped"):
        block = name[1]
        return name if block is None else (name[0], (block[0] + graphs, *block[1:]), *name[2:])
    return (name[0], name[1] + graphs, *name[2:]) if len(name) > 2 else name


def _told(step: RecordedStep) -> dict[str, Any]:
    treated = None if step.treated is None else sorted(step.treated)
    return {"names": step.names, "blocks": step.blocks, "profile": asdict(step.profile), "treated": treated}


def _step(found: dict[str, Any]) -> RecordedStep:
    names, blocks = ([_name(each) for each in found[column]] for column in ("names", "blocks"))
    return RecordedStep(names, blocks, Profile(**found["profile"]), found["treated"])


def _name(found: Sequence[Any]) -> Name:
    return tuple([_name(each) if isinstance(each, list) else each for each in found])
