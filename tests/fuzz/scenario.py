"""What is done with a program: a step, or something that makes its graphs live in another manner.

A scenario runs the same without tiering, with one manager and with two. Whatever it observes has to be the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.program import Boom, Nothing
from tests.fuzz.world import World
from tiered_mem import NotRepeatable


class Wrong(Exception):
    """Something that must be did not come to pass."""


Scenario = Callable[[World], None]


def steps(world: World) -> None:
    for number in range(2):
        world.step(number)
        world.update()


def accumulated(world: World) -> None:
    """Several forwards, then their backwards, or one for the sum."""
    inputs = [world.program.input(number) for number in range(3)]
    losses = [world.forward(x) for x in inputs]
    if world.rng.random() < 0.5:
        torch.stack(losses).sum().backward()
    else:
        for loss in losses:
            loss.backward()
    world.see(*losses)
    world.take(*inputs)


def interleaved(world: World) -> None:
    """Graphs in flight, whose backwards come in any order between the forwards."""
    alive: list[tuple[Tensor, Tensor]] = []
    for number in range(4):
        x = world.program.input(number)
        alive.append((world.forward(x), x))
        while alive and world.rng.random() < 0.4:
            _run_one(world, alive)
    while alive:
        _run_one(world, alive)


def _run_one(world: World, alive: list[tuple[Tensor, Tensor]]) -> None:
    loss, x = alive.pop(world.rng.randrange(len(alive)))
    loss.backward()
    world.see(loss)
    world.take(x)


def retained(world: World) -> None:
    x = world.program.input(0)
    loss = world.forward(x)
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        world.take(x)


def double_backward(world: World) -> None:
    x = world.program.input(0)
    loss = world.forward(x)
    leaves = world.leaves(x)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    penalty = sum((g.float().square().sum() for g in gradients if g is not None), loss)
    penalty.backward()
    world.see(loss, penalty)
    world.take(x)


def part_of_backward(world: World) -> None:
    """Gradients of some leaves alone, of a graph that is dropped then, or used once more."""
    x = world.program.input(0)
    loss = world.forward(x)
    leaves = world.leaves(x)
    some = world.rng.sample(leaves, min(3, len(leaves)))
    again = world.rng.random() < 0.5
    world.see(*torch.autograd.grad(loss, some, retain_graph=again, allow_unused=True))
    if again:
        loss.backward()
        world.take(x)
    del loss
    world.step(1)


def without_backward(world: World) -> None:
    for number in range(2):
        loss = world.forward(world.program.input(number))
        world.see(loss)
        if world.rng.random() < 0.5:
            world.step(number)


def failing_forward(world: World) -> None:
    x, calls = world.program.input(0), len(world.program.plan.calls)
    for _ in range(2):
        try:
            world.forward(x, fail_in=world.rng.randrange(calls))
        except Boom:
            world.forget(x)
        else:
            raise Wrong("the forward did not fail")
        world.step(1)


def failing_backward(world: World) -> None:
    """An exception where the gradient of a layer's output arrives."""
    x = world.program.input(0)
    layer = world.program.layers[world.rng.choice(world.program.plan.calls).layer]

    def explode(module: Any, gradients: Any) -> None:
        raise Boom("backward was told to fail")

    handle = layer.register_full_backward_pre_hook(explode)
    try:
        loss = world.forward(x)
        with contextlib.suppress(Boom):
            loss.backward()
        del loss
    finally:
        handle.remove()
    world.forget(x)
    world.step(1)


def failing_recomputation(world: World) -> None:
    """Layers that fail when they are computed again: by a checkpoint of theirs, or because a policy wants it.

    How far that backward comes, and what layers have changed by then, is another matter with a policy.
    """
    x = world.program.input(0)
    loss = world.forward(x)
    state = world.program.state()
    layers: Any = world.program.layers
    for layer in layers:
        layer.fails = True
    with contextlib.suppress(Boom, NotRepeatable):
        loss.backward()
    for layer in layers:
        layer.fails = False
    world.program.restore(state)
    del loss
    world.forget(x)
    world.step(1)


def evaluated_between(world: World) -> None:
    """The same layers without gradients, in the context and out of it, between a forward and its backward."""
    x = world.program.input(0)
    loss = world.forward(x)
    quiet = world.rng.choice((torch.no_grad, torch.inference_mode))
    with quiet():
        world.see(world.forward(x))
        world.see(world.program(x, Nothing()))
    loss.backward()
    world.see(loss)
    world.take(x)


def evaluated_inside(world: World) -> None:
    """A whole forward and backward while another one's context is entered."""
    x = world.program.input(0)
    with contextlib.ExitStack() as stack:
        for each in world.tiered[:1]:
            stack.enter_context(each.forward())
        torch.manual_seed(1)
        with torch.no_grad():
            world.see(world.program(x, Nothing()))
        loss = world.program(x, Nothing())
        loss.backward()
    world.see(loss)
    world.take(x)


def evaluated_in_a_thread(world: World) -> None:
    """Another thread runs the same layers without gradients while a context is entered."""
    x = world.program.input(0)

    def evaluate() -> None:
        with torch.no_grad():
            world.program(x, Nothing())

    with contextlib.ExitStack() as stack:
        for each in world.tiered[:1]:
            stack.enter_context(each.forward())
        torch.manual_seed(1)
        in_thread(evaluate)
        loss = world.program(x, Nothing())
    loss.backward()
    world.see(loss)
    world.take(x)


def backward_in_a_thread(world: World) -> None:
    x = world.program.input(0)
    loss = world.forward(x)
    in_thread(loss.backward)
    world.see(loss)
    world.take(x)


def in_thread(work: Callable[[], object]) -> None:
    """Runs it on a thread of its own, and raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


def nested(world: World) -> None:
    """A context that is entered twice says no, and serves the next step."""
    if not all(each.refuses_to_nest() for each in world.tiered):
        raise Wrong("a context was entered twice")
    world.step(0)


def phases(world: World) -> None:
    """The weights go to the host and come back between steps, between a forward and its backward too."""
    world.step(0)
    world.phase()
    world.update()
    x = world.program.input(1)
    loss = world.forward(x)
    if world.rng.random() < 0.5:
        world.phase()
    loss.backward()
    world.phase(gradients=True)
    world.see(loss)
    world.take(x)


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        steps,
        accumulated,
        interleaved,
        retained,
        double_backward,
        part_of_backward,
        without_backward,
        failing_forward,
        failing_backward,
        failing_recomputation,
        evaluated_between,
        evaluated_inside,
        evaluated_in_a_thread,
        backward_in_a_thread,
        nested,
        phases,
    )
}
