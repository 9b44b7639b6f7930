"""Whether the host waits for copies, read off the device's own timeline, on a new and on an old stack.

Each run is a process of its own, which trains one step over a slow link. It says when each of the manager's calls
returned and how many bytes it had set in motion, and when the emulated device ran which copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
from ascend_emulator import Span

from emulator.tests.launch import EMULATOR, run, write_script
from tests.conftest import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED, reason="the emulated device alone has a timeline, and an old stack")

ROOT = Path(__file__).parents[2]
LAYERS, NBYTES = 3, 5 << 18  # each layer saves two tensors of that size
LINK = "5MB/s"  # a quarter of a second for each
DIRECTIONS = {"copy_d2h": "offloaded", "copy_h2d": "reloaded"}
SOURCES = {"current": "AclPinnedMemory", "old": "TorchPinnedMemory"}

STEP = """
    import json
    import sys
    import time
    from functools import partial

    import torch
    from ascend_emulator import record_timeline

    from tiered_mem import TieringManager
    from tiered_mem.policies import LayerOrderPolicy

    layers, nbytes = int(sys.argv[1]), int(sys.argv[2])
    options = json.loads(sys.argv[3])
    calls = []

    class Layer(torch.nn.Module):
        def forward(self, x):
            return torch.cos(torch.sin(x))  # each saves its input

    def observed(notify, event):
        before = manager.stats()
        notify(event)
        returned = time.perf_counter()
        after = manager.stats()
        keys = ("offloaded.bytes.total", "reloaded.bytes.total")
        moved = [after[key] - before[key] for key in keys]
        name = type(event).__name__ + (" backward" if getattr(event, "backward", False) else "")
        calls.append([name, returned, *moved])

    def gradient(x, forward):
        forward(x).sum().backward()
        torch.npu.synchronize()
        return x.grad

    def offloaded(x):
        with offload:
            return model(x)

    values = torch.randn(nbytes // 4)
    model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
    expected = gradient(values.npu().requires_grad_(), model)
    x = values.npu().requires_grad_()
    torch.npu.synchronize()
    policy = LayerOrderPolicy(in_flight=1)  # with 0 the next layer waits for the copies of the one before
    with TieringManager(policy=policy, device="npu", host_bytes="64MiB", **options) as manager:
        manager._activations.notify = partial(observed, manager._activations.notify)
        offload = manager.offload_context(list(model))
        with record_timeline() as spans:
            result = gradient(x, offloaded)
        stats = manager.stats()
    same = torch.equal(result.cpu(), expected.cpu())
    print(json.dumps({"calls": calls, "spans": spans, "stats": stats, "same": same}))
"""


class Call(NamedTuple):
    """One event that the manager was told of. returned: on the timeline's clock."""

    event: str
    returned: float
    offloaded: int
    reloaded: int


@dataclass(frozen=True)
class Step:
    """What a process said of its step."""

    calls: list[Call]
    spans: list[Span]
    stats: dict[str, int | str]
    same: bool

    def copies(self, *names: str) -> list[Span]:
        return sorted((span for span in self.spans if span.name in names), key=lambda span: span.start)

    def kernels_beside_copies(self) -> list[Span]:
        """What was computed while a copy was under way."""
        copies = self.copies(*DIRECTIONS)
        kernels = [span for span in self.spans if span.name not in DIRECTIONS]
        return [k for k in kernels if any(k.start < copy.end and copy.start < k.end for copy in copies)]

    def issued(self, name: str) -> Iterator[tuple[Call, Span]]:
        """Each copy of a direction, with the call that issued it: one stream runs them in the order of issue."""
        copies = iter(self.copies(name))
        for call in self.calls:
            left = getattr(call, DIRECTIONS[name])
            while left > 0:
                span = next(copies)
                left -= span.nbytes
                yield call, span
            assert left == 0, f"{call} issued a part of a copy"
        assert not list(copies), "nobody issued these"


class TakeStep(Protocol):
    """Takes a step on a stack, with or without torch_npu's task queue, and with or without pinned host memory."""

    def __call__(self, stack: str, queue: str = "1", pinned: bool = True) -> Step: ...


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> TakeStep:
    """Each kind of step is taken once."""

    @cache
    def take(stack: str, queue: str, pinned: bool) -> Step:
        folder = tmp_path_factory.mktemp("step")
        script = write_script(folder, STEP)
        arguments = ("--stack", stack, "--h2d", LINK, "--d2h", LINK, script, str(LAYERS), str(NBYTES))
        options = {} if pinned else {"pin": False}
        done = run(*EMULATOR, *arguments, json.dumps(options), cwd=folder, pythonpath=ROOT, TASK_QUEUE_ENABLE=queue)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        calls = [Call(*call) for call in said["calls"]]
        return Step(calls, [Span(*span) for span in said["spans"]], said["stats"], said["same"])

    return lambda stack, queue="1", pinned=True: take(stack, queue, pinned)


slow = partial(pytest.param, marks=pytest.mark.slow(why="one kind of step more, in a process that imports torch"))


@pytest.fixture(
    params=[slow(("current", "1")), slow(("current", "0")), slow(("old", "1")), slow(("old", "0"))], ids="-".join
)
def unpinned_step(request: pytest.FixtureRequest, step: TakeStep) -> Step:
    """A step over host memory that is not pinned, on each stack with and without the queue."""
    stack, queue = request.param
    return step(stack, queue, pinned=False)


on_both_stacks = pytest.mark.parametrize("stack", ["current", slow("old")])
with_and_without_the_queue = pytest.mark.parametrize("queue", ["1", slow("0")])
in_both_directions = pytest.mark.parametrize(
    ("name", "event"), [("copy_d2h", "LayerEnd"), ("copy_h2d", "LayerBegin backward")]
)


@on_both_stacks
@with_and_without_the_queue
@in_both_directions
def test_the_call_that_issues_a_copy_returns_before_the_copy_ends(
    step: TakeStep, stack: str, queue: str, name: str, event: str
) -> None:
    issued = list(step(stack, queue).issued(name))
    assert len(issued) == 2 * LAYERS
    assert {call.event for call, _ in issued} == {event}
    late = [(call, span) for call, span in issued if call.returned >= span.end]
    assert not late, "the host waited for these"


@on_both_stacks
@with_and_without_the_queue
def test_the_gradient_is_the_same_and_nothing_came_on_demand(step: TakeStep, stack: str, queue: str) -> None:
    taken = step(stack, queue)
    assert taken.same
    assert taken.stats["reloads_on_demand.total"] == 0


@on_both_stacks
def test_each_byte_that_was_copied_is_counted(step: TakeStep, stack: str) -> None:
    taken = step(stack)
    for name, counted in DIRECTIONS.items():
        copies = taken.copies(name)
        assert [span.nbytes for span in copies] == [NBYTES] * 2 * LAYERS
        assert taken.stats[f"{counted}.blocks.total"] == len(copies)
        assert taken.stats[f"{counted}.bytes.total"] == sum(span.nbytes for span in copies)


@on_both_stacks
def test_the_host_memory_is_pinned_and_no_copy_blocks(step: TakeStep, stack: str) -> None:
    stats = step(stack).stats
    assert stats["host.source"] == SOURCES[stack]
    assert stats["blocking.copies.total"] == 0
    assert stats["blocking.bytes.total"] == 0


@on_both_stacks
@with_and_without_the_queue
def test_computation_goes_on_beside_the_copies(step: TakeStep, stack: str, queue: str) -> None:
    assert step(stack, queue).kernels_beside_copies()


# The new stack copies lists by one call, which torch_npu puts on its queue: there it is the queue that waits.
@pytest.mark.parametrize(("stack", "queue"), [slow("current", "0"), slow("old", "0"), slow("old", "1")])
@in_both_directions
def test_a_copy_of_memory_that_is_not_pinned_has_ended_when_the_call_returns(
    step: TakeStep, stack: str, queue: str, name: str, event: str
) -> None:
    issued = list(step(stack, queue, pinned=False).issued(name))
    assert len(issued) == 2 * LAYERS
    assert {call.event for call, _ in issued} == {event}
    early = [(call, span) for call, span in issued if call.returned <= span.end]
    assert not early, "the host did not wait for these"


def test_nothing_is_computed_beside_copies_of_memory_that_is_not_pinned(unpinned_step: Step) -> None:
    assert unpinned_step.same
    assert not unpinned_step.kernels_beside_copies()


def test_each_copy_of_memory_that_is_not_pinned_is_counted_as_blocking(unpinned_step: Step) -> None:
    copies = unpinned_step.copies(*DIRECTIONS)
    assert unpinned_step.stats["host.source"] == "PageableMemory"
    assert unpinned_step.stats["blocking.copies.total"] == len(copies) == 4 * LAYERS
    assert unpinned_step.stats["blocking.bytes.total"] == sum(span.nbytes for span in copies)
