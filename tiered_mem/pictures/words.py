"""What a timeline means, and what is not in it, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..sizes import format_bytes, format_seconds
from ..trace.records import HOST_WAITS, WAITS
from .timeline import Timeline

_MOST = 3
_WHY = {
    "release": "{time} in {layer} until copies to the host have ended whose memory is given up there",
    "reload": "{time} in {layer} until what it saved is back on the device",
    "states": "{time} in {layer} until optimizer states are on the device that are stepped beside it",
    "drop": "{time} in {layer} until copies have ended that nobody needs any more",
}
_HELPS = {
    "release": "Where a release is waited for: offload fewer layers, keep one more on the device (in_flight), or "
    "give a larger budget.",
    "reload": "Where a reload is waited for: reload earlier, or offload fewer layers.",
    HOST_WAITS: "Where the host waits for room: give more host_bytes.",
}


def title(timeline: Timeline) -> str:
    """Such as "npu:0, steps 7 to 8 of 8: 1.9 s"."""
    shown = "all that was recorded"
    if timeline.steps:
        first, last = timeline.first_step, timeline.first_step + len(timeline.steps) - 1
        shown = f"step {first}" if first == last else f"steps {first} to {last}"
        shown += " of those recorded" if timeline.left_out else f" of {last}"
    return f"{timeline.device}, {shown}: {format_seconds(timeline.ended - timeline.began)}"


def missing(timeline: Timeline) -> Iterator[str]:
    """What a picture of it cannot show, and why."""
    if not timeline.steps:
        yield "No step can be told from the next one: all that was recorded is shown."
    if "device" not in timeline.levels:
        yield "Device memory was not recorded: torch counts none for this device."
    if "host" not in timeline.levels:
        yield "Host memory was not recorded."
    if "disk" not in timeline.levels:
        yield "Nothing was recorded of a disk: the manager had no disk tier."
    if timeline.budget is None:
        yield 'There is no line for the budget: policy="auto" has one, on a device that counts memory.'
    if "device" in timeline.levels:
        yield (
            "Device memory is that where layers begin and end and where compute comes to a wait; in between it may "
            "be more."
        )
    if timeline.left_out:
        yield f"{timeline.left_out} older records were left out."


def waits(timeline: Timeline) -> Iterator[str]:
    """How long compute waits in all, and then where the longest and for what, and how long the host does."""
    by: dict[tuple[str, str], float] = defaultdict(float)
    for span in timeline.spans.get(WAITS, ()):
        by[span.name, span.layer] += span.seconds
    waited, whole = sum(by.values()), timeline.ended - timeline.began
    share = f", {100 * waited / whole:.1f} % of the time" if whole > 0 else ""
    yield f"Compute waits {format_seconds(waited)} for copies{share}." if by else "Compute waits for no copy."
    for (why, layer), seconds in sorted(by.items(), key=lambda each: each[1], reverse=True)[:_MOST]:
        yield _WHY.get(why, "{time} in {layer}: " + why).format(time=format_seconds(seconds), layer=layer)
    if host := timeline.spans.get(HOST_WAITS):
        yield f"{format_seconds(sum(span.seconds for span in host))} in which the host waits for room in its memory"


def advice(timeline: Timeline) -> Iterator[str]:
    """What would help: the manager's own advice, or what helps for such waits as a rule."""
    if timeline.advice:
        yield from timeline.advice
        return
    found = {span.name for span in timeline.spans.get(WAITS, ())} | {HOST_WAITS} & timeline.spans.keys()
    yield from (text for why, text in _HELPS.items() if why in found)


def peaks(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """The most in each tier, and the budget."""
    for tier in timeline.levels:
        found = timeline.peak(tier)
        if found is not None:
            yield f"most on the {tier}", format_bytes(found[1])
    if timeline.budget is not None:
        yield "device budget", format_bytes(timeline.budget)


def step_times(timeline: Timeline) -> list[float]:
    """The seconds from each step's beginning to the next one's, or to the end."""
    ends = [*timeline.steps[1:], timeline.ended]
    return [end - begin for begin, end in zip(timeline.steps, ends, strict=True)]
