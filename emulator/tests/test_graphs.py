"""Graphs of torch_npu: a capture runs nothing, and each replay runs all that was captured."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ascend_emulator import record_timeline
from torch import Tensor, nn

MIB = 1 << 20
PAIR = (2,)


def ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or PAIR), device="npu")


def captured(work: Callable[[], object]) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        work()
    return graph


def test_a_capture_runs_nothing_and_each_replay_runs_all() -> None:
    count, source = torch.zeros(2, device="npu"), ones()
    result = torch.empty(2, device="npu")
    graph = captured(lambda: result.copy_(count.add_(source) * 10))
    assert count.tolist() == [0, 0]
    graph.replay()
    assert (count.tolist(), result.tolist()) == ([1, 1], [10, 10])
    source.fill_(2)
    graph.replay()
    graph.replay()
    assert (count.tolist(), result.tolist()) == ([5, 5], [50, 50])


def test_a_replay_is_behind_what_its_stream_has_and_before_what_comes() -> None:
    value = torch.zeros(1 << 16, device="npu")
    graph = captured(lambda: value.add_(1))
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        for _ in range(20):
            value.mul_(2)
            graph.replay()
    torch.npu.current_stream().wait_stream(stream)
    assert set(value.tolist()) == {2**20 - 1}


def test_streams_of_a_graph_wait_for_each_other_in_each_replay(link: Callable[[str], None]) -> None:
    """The copy is slow, and lies on a stream beside the one on which the capture began."""
    link("50MB/s")
    host, target, total = torch.ones(MIB // 4).pin_memory(), ones(MIB // 4), torch.zeros((), device="npu")
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        target.zero_()
        side.wait_stream(main)
        with torch.npu.stream(side):
            target.copy_(host, non_blocking=True)
        main.wait_stream(side)
        total.copy_(target.sum())
    for number in range(1, 4):
        torch.npu.synchronize()
        host.fill_(number)
        graph.replay()
        assert total.item() == number * MIB // 4


def test_a_stream_that_does_not_come_back_makes_the_capture_fail() -> None:
    value, side, stream = ones(), torch.npu.Stream(), torch.npu.current_stream()

    def leave_a_stream() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            value.add_(1)

    with pytest.raises(RuntimeError, match="107025"):
        captured(leave_a_stream)
    torch.npu.set_stream(stream)  # torch_npu's context leaves it where capture_end fails
    with torch.npu.stream(side):
        assert (value + 1).tolist() == [2, 2]
    copied = torch.ones(2).pin_memory().npu(non_blocking=True)
    copied.record_stream(side)
    del copied
    assert captured(lambda: value.add_(1)).replay() is None
    assert value.tolist() == [2, 2]


def test_a_graph_copies_pinned_memory_as_it_is_when_the_replay_runs() -> None:
    source, target = torch.ones(4).pin_memory(), torch.zeros(4, device="npu")
    back = torch.zeros(4).pin_memory()

    def there_and_back() -> None:
        target.copy_(source, non_blocking=True)
        back.copy_(target * 2, non_blocking=True)

    graph = captured(there_and_back)
    for number in (1, 7):
        source.fill_(number)
        graph.replay()
        torch.npu.synchronize()
        assert back.tolist() == [2 * number] * 4


def test_memory_of_a_graph_is_its_own_until_it_is_reset() -> None:
    torch.npu.empty_cache()
    gc.collect()
    before = torch.npu.memory_reserved()
    results: list[Tensor] = []
    graph = captured(lambda: results.append(torch.full((8 * MIB,), 3.0, device="npu") * 2))
    address = results[0].data_ptr()
    results.clear()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() >= before + 64 * MIB
    others = [torch.zeros(8 * MIB, device="npu") for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    graph.replay()
    assert [other.count_nonzero().item() for other in others] == [0] * 3
    del others
    graph.reset()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    # An older torch_npu keeps a graph's seed until the graph is gone.
    assert torch.npu.memory_reserved() <= before + 2 * MIB


RANDOM: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(ones(64, 64), 0.25),
    "two_dropouts": lambda: F.dropout(F.dropout(ones(64, 64), 0.25), 0.5),
    "uniform": lambda: torch.rand(100, device="npu"),
    "normal": lambda: torch.randn(100, device="npu"),
    "integers": lambda: torch.randint(0, 1000, (100,), device="npu"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_replays_draw_what_calls_outside_a_graph_would_have_drawn(name: str) -> None:
    draw = RANDOM[name]
    results: list[Tensor] = []
    graph = captured(lambda: results.append(draw()))
    torch.npu.manual_seed(5)
    expected = [draw() for _ in range(3)]
    torch.npu.manual_seed(5)
    for number, each in enumerate(expected):
        if number == 1:  # a call between two replays has numbers of its own
            assert draw().equal(each)
            continue
        graph.replay()
        assert results[0].equal(each)
    assert not expected[0].equal(expected[1])


# torch says so of the parameters, for which make_graphed_callables has taken gradients on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_graphed_module_trains_as_the_module_does() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 8)).npu()
    x, target = torch.randn(2, 4, 8, device="npu")
    graphed = torch.npu.make_graphed_callables(copy.deepcopy(plain), (torch.randn(4, 8, device="npu"),))

    def train(module: nn.Module) -> list[float]:
        torch.npu.manual_seed(3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            loss = F.mse_loss(module(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(graphed) == train(plain)


def test_a_graph_of_a_whole_step_trains_as_the_step_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)).npu()
    batches = torch.randn(5, 2, 4, 8, device="npu")
    x, target = batches[0].clone()

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(module(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for batch in [batches[0], *batches]:
        x.copy_(batch[0])
        target.copy_(batch[1])
        expected.append(step(plain, sgd).item())

    x.copy_(batches[0][0])
    target.copy_(batches[0][1])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    aside = torch.npu.Stream()
    aside.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(aside):
        losses = [step(model, sgd).item()]  # makes the momenta
    torch.npu.current_stream().wait_stream(aside)
    loss = torch.zeros((), device="npu")
    graph = captured(lambda: loss.copy_(step(model, sgd)))
    for batch in batches:
        x.copy_(batch[0])
        target.copy_(batch[1])
        graph.replay()
        losses.append(loss.item())
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_operator_without_a_kernel_is_refused_by_its_name_and_the_capture_goes_on() -> None:
    value, matrix = ones(), torch.eye(2, device="npu")

    def work() -> None:
        with pytest.raises(NotImplementedError, match=r"aten\.linalg_qr\.default runs on the CPU here"):
            torch.linalg.qr(matrix)
        value.add_(1)

    graph = captured(work)
    graph.replay()
    assert value.tolist() == [2, 2]


REFUSED: dict[str, tuple[Callable[[Tensor, torch.npu.Event], object], str]] = {
    "item": (lambda value, event: value.sum().item(), "107027"),
    "to_the_host": (lambda value, event: value.cpu(), "107030"),
    "from_the_host": (lambda value, event: torch.ones(2).npu(), "107030"),
    "synchronize_the_stream": (lambda value, event: torch.npu.current_stream().synchronize(), "107027"),
    "query_the_stream": (lambda value, event: torch.npu.current_stream().query(), "107027"),
    "synchronize_the_device": (lambda value, event: torch.npu.synchronize(), "107027"),
    "synchronize_an_event": (lambda value, event: event.synchronize(), "107028"),
    "query_an_event": (lambda value, event: query(event), "107028"),
    "replay_another": (lambda value, event: EMPTY[0].replay(), "107027|during capturing stage"),
    "external_event": (lambda value, event: torch.npu.ExternalEvent().record(), "external events"),
}
EMPTY: list[torch.npu.NPUGraph] = []


def query(event: torch.npu.Event) -> None:
    """torch_npu's task queue answers in the device's place where it has not recorded the event yet."""
    while not event.query():
        pass


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on(name: str) -> None:
    refused, code = REFUSED[name]
    value = ones()
    EMPTY[:] = [captured(lambda: None)]

    def work() -> None:
        event = torch.npu.current_stream().record_event()
        with pytest.raises(RuntimeError, match=code):
            refused(value, event)
        value.add_(1)

    graph = captured(work)
    graph.replay()
    assert value.tolist() == [2, 2]
    assert torch.npu.current_stream().query() in (True, False)


def test_a_captured_event_is_after_the_capture_what_it_was_before() -> None:
    event = torch.npu.Event()
    captured(lambda: event.record())
    assert event.query()
    event.synchronize()
    torch.npu.current_stream().wait_event(event)
    torch.npu.synchronize()


def test_the_timeline_has_each_replay() -> None:
    value = ones()
    graph = captured(lambda: value.add_(1).mul_(2))
    torch.npu.synchronize()
    with record_timeline() as spans:
        graph.replay()
        graph.replay()
        torch.npu.synchronize()
    # An older torch_npu also tells each graph its seed, whether it draws numbers or not.
    spans = [span for span in spans if span.name != "aclnnInplaceFillScalar"]
    assert [span.name for span in spans] == ["aclnnInplaceAdds", "aclnnInplaceMuls"] * 2
    assert len({span.stream for span in spans}) == 1


def test_a_graph_that_is_gone_leaves_its_replay_whole() -> None:
    value = torch.zeros(1 << 16, device="npu")
    graph = captured(lambda: [value.add_(1) for _ in range(50)])
    graph.replay()
    del graph
    gc.collect()
    assert set(value.tolist()) == {50}


def test_tasks_that_replays_could_exchange_are_refused() -> None:
    stream = torch.npu.current_stream()

    def work() -> None:
        with pytest.raises(RuntimeError, match="aclmdlRICaptureTaskGrpBegin is not emulated"):
            torch.npu.graph_task_group_begin(torch.npu.current_stream())

    captured(work)
    assert torch.npu.current_stream() == stream
