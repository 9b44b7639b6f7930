"""The rule of MindSpeed's SmartSwap, made from a recorded step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tiered_mem.policies.planning.profile import Plan, Profile
from tiered_mem.policies.planning.recording import Name

# What its configuration has: bytes of the smallest tensor, bytes each second both ways, and the weight of sizes.
_SMALLEST = 20 << 20
_RATE = 25.6e9
_SIZES = 2.0


class SmartSwap:
    """Chooses what leaves so that a step comes below a target, layer by layer.

    A stage is a layer's forward or backward. Tensors are taken by a score: the share of the moments above the
    target that they cover, and twice the cube root of their size, both between 0 and 1. Of those that cover the
    highest moment the ones come first that cause no delay: whose copies fit into the stages between save and use,
    beside those taken already. If there are none it is the one with the best score. Memory is given up in the stage
    after its copy out, the earliest that can be configured. MindSpeed's own search also moves optimizer states.

    profile, names: a step in which nothing moves, and what its positions are called.
    """

    def __init__(self, profile: Profile, names: Sequence[Name], target: int) -> None:
        self._profile = profile
        self._target = target
        layers = (k for k, name in enumerate(names) if name[0] in ("forward", "backward"))
        self._begins = sorted({0, *layers, len(names)})
        seconds = [sum(profile.seconds[a:z]) for a, z in zip(self._begins, self._begins[1:], strict=False)]
        self._room_out, self._room_back = list(seconds), list(seconds)
        self._need = [most - target for most in profile.full]

    def plan(self) -> Plan:
        """The choice, without a prediction. Above the target where nothing more can leave."""
        profile = self._profile
        over = [k for k, need in enumerate(self._need) if need > 0]
        left = [
            b
            for b, nbytes in enumerate(profile.nbytes)
            if nbytes >= _SMALLEST and self._stage(profile.used[b]) > self._stage(profile.saved[b]) + 1
        ]
        covers = {b: self._covered(over, *self._between(b)) for b in left}
        sizes = {b: profile.nbytes[b] ** (1 / 3) for b in left}
        score = {b: _share(covers, b) + _SIZES * _share(sizes, b) for b in left}
        left.sort(key=score.__getitem__, reverse=True)
        release: dict[int, int] = {}
        reload: dict[int, int] = {}
        while left and max(self._need) > 0:
            peak = self._need.index(max(self._need))
            covering = [b for b in left if self._between(b)[0] <= peak < self._between(b)[1]]
            if not covering:
                break
            taken = 0
            for b in covering:
                if self._need[peak] <= 0:
                    break
                if (stages := self._arranged(b)) is not None:
                    self._take(b, *stages, release, reload)
                    left.remove(b)
                    taken += 1
            if not taken:
                b = covering[0]
                self._take(b, self._stage(profile.saved[b]), self._stage(profile.used[b]) - 1, release, reload)
                left.remove(b)
        return Plan(release, reload, self._target + max(self._need), self._target, 0.0, (), 0.0)

    def _stage(self, position: int) -> int:
        return min(bisect_right(self._begins, position), len(self._begins) - 1) - 1

    def _between(self, b: int) -> tuple[int, int]:
        """From the stage after its save to the beginning of that of its use."""
        profile = self._profile
        return self._begins[self._stage(profile.saved[b]) + 1], self._begins[self._stage(profile.used[b])]

    def _covered(self, over: Sequence[int], first: int, end: int) -> float:
        return float(bisect_right(over, end - 1) - bisect_right(over, first - 1))

    def _arranged(self, b: int) -> tuple[int, int] | None:
        """The stages in which its copy out ends and its copy back begins; None where they do not fit."""
        first, last = self._stage(self._profile.saved[b]), self._stage(self._profile.used[b]) - 1
        out, seconds = first, self._profile.nbytes[b] / _RATE
        while out < last and seconds > self._room_out[out]:
            seconds -= self._room_out[out]
            out += 1
        back, seconds = last, self._profile.nbytes[b] / _RATE
        while back > out and seconds > self._room_back[back]:
            seconds -= self._room_back[back]
            back -= 1
        return (out, back) if back > out else None

    def _take(self, b: int, out: int, back: int, release: dict[int, int], reload: dict[int, int]) -> None:
        profile = self._profile
        _use(self._room_out, range(self._stage(profile.saved[b]), out + 1), profile.nbytes[b] / _RATE)
        _use(self._room_back, range(self._stage(profile.used[b]) - 1, back - 1, -1), profile.nbytes[b] / _RATE)
        release[b] = self._begins[out + 1]
        reload[b] = min(max(self._begins[back], release[b] + 1), profile.used[b])
        for k in range(release[b], reload[b]):
            self._need[k] -= profile.nbytes[b]


def _share(values: dict[int, float], b: int) -> float:
    """Where a value lies between the least and the most of all."""
    least, most = min(values.values()), max(values.values())
    return (values[b] - least) / max(most - least, 1e-3)


def _use(room: list[float], stages: Sequence[int], seconds: float) -> None:
    for stage in stages:
        used = min(seconds, max(0.0, room[stage]))
        room[stage] -= used
        seconds -= used
