"""Functions of the host that a stream calls: by CANN's functions, and by those of torch_npu that use them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulator.tests.acl import Acl

TAKEN, NO_THREAD, TIMEOUT = 107012, 107015, 507012
NO_BLOCK, BLOCK = 0, 1  # aclrtCallbackBlockType
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def stream(acl: Acl) -> Iterator[int]:
    with acl.streams(1) as (made,):
        yield made


@pytest.fixture
def subscribed(acl: Acl, stream: int) -> Iterator[int]:
    """A stream with a thread that makes its calls."""
    ended = threading.Event()

    def make_calls() -> None:
        while not ended.is_set():
            acl.call("aclrtProcessReport", 10)

    thread = threading.Thread(target=make_calls)
    thread.start()
    acl.check("aclrtSubscribeReport", thread.ident, stream)
    yield stream
    acl.check("aclrtUnSubscribeReport", thread.ident, stream)
    ended.set()
    thread.join()


def test_a_stream_calls_a_host_function_in_its_turn(acl: Acl, stream: int) -> None:
    called: list[int | None] = []
    function = CALLBACK(lambda data: called.append(data))
    for data in (1, 2, 3):
        acl.check("aclrtLaunchHostFunc", stream, function, data)
    acl.check("aclrtSynchronizeStream", stream)
    assert called == [1, 2, 3]


@pytest.mark.parametrize("kind", [NO_BLOCK, BLOCK])
def test_a_thread_that_has_subscribed_makes_the_calls(acl: Acl, subscribed: int, kind: int) -> None:
    threads: list[int] = []
    called = threading.Semaphore(0)

    def function(data: int | None) -> None:
        threads.append(threading.get_ident())
        called.release()

    pointer = CALLBACK(function)
    for _ in range(3):
        acl.check("aclrtLaunchCallback", pointer, 0, kind, subscribed)
    acl.check("aclrtSynchronizeStream", subscribed)
    assert kind == NO_BLOCK or len(threads) == 3
    for _ in range(3):
        assert called.acquire(timeout=60)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_a_blocking_callback_ends_before_the_stream_goes_on(acl: Acl, subscribed: int) -> None:
    order: list[str] = []
    callback = CALLBACK(lambda data: order.append("callback"))
    behind = CALLBACK(lambda data: order.append("behind it"))
    for _ in range(20):
        acl.check("aclrtLaunchCallback", callback, 0, BLOCK, subscribed)
        acl.check("aclrtLaunchHostFunc", subscribed, behind, 0)
    acl.check("aclrtSynchronizeStream", subscribed)
    assert order == ["callback", "behind it"] * 20


def test_a_callback_needs_a_thread(acl: Acl, stream: int) -> None:
    assert acl.call("aclrtLaunchCallback", CALLBACK(lambda data: None), 0, BLOCK, stream) == NO_THREAD
    assert acl.call("aclrtProcessReport", 1) == TIMEOUT
    acl.check("aclrtSubscribeReport", 1, stream)
    assert acl.call("aclrtSubscribeReport", 2, stream) == TAKEN
    assert acl.call("aclrtUnSubscribeReport", 2, stream) == TAKEN
    acl.check("aclrtUnSubscribeReport", 1, stream)


def test_a_callback_does_not_wait_for_a_thread_that_has_left(acl: Acl, stream: int) -> None:
    acl.check("aclrtSubscribeReport", 1, stream)  # which never asks for calls
    function = CALLBACK(lambda data: None)
    for _ in range(20):
        acl.check("aclrtLaunchCallback", function, 0, BLOCK, stream)
    acl.check("aclrtUnSubscribeReport", 1, stream)
    assert acl.call("aclrtSynchronizeStream", stream) != 0
    assert "unsubscribed" in acl.message()


def test_who_issues_work_waits_for_no_call_of_the_program(acl: Acl) -> None:
    """Which may need what the one who issues holds: here a lock."""
    held, called = threading.Lock(), []

    def function(data: int | None) -> None:
        with held:
            called.append(data)

    pointer = CALLBACK(function)
    with acl.streams(2) as (calling, other):
        with held:
            for _ in range(10):
                acl.check("aclrtLaunchHostFunc", calling, pointer, 1)
                acl.check("aclrtLaunchHostFunc", other, pointer, 1)
        acl.check("aclrtSynchronizeStream", calling)
        acl.check("aclrtSynchronizeStream", other)
    assert called == [1] * 20


@pytest.mark.skipif(not hasattr(torch.ops.npu, "save_npugraph_tensor"), reason="this torch_npu does not have it")
def test_each_replay_saves_a_tensor_as_it_is_then(tmp_path: Path) -> None:
    x = torch.zeros(3, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
        torch.ops.npu.save_npugraph_tensor(x, save_path=str(tmp_path / "x.pt"))
    for count in (1, 2):
        graph.replay()
        torch.npu.synchronize()
        (saved,) = tmp_path.iterdir()
        assert torch.load(saved).tolist() == [count] * 3
