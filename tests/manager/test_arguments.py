"""What users pass by mistake is refused where they pass it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, LRUPolicy, PlannedPolicy, SynchronizationDictPolicy
from tiered_mem.policies.planning import Link

pytestmark = pytest.mark.once(why="it needs no device")

GARBAGE: dict[str, Any] = {
    "None": None,
    "a class": nn.Linear,
    "an object": object(),
    "NaN": math.nan,
    "infinity": math.inf,
    "a fraction": 1.5,
    "below zero": -1,
    "text": "x y",
    "bytes": b"1",
    "a list": [1],
    "True": True,
}
LINK = Link(1e9, 1e9)
MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def manager(**arguments: Any) -> TieringManager:
    return TieringManager(**{"policy": LayerOrderPolicy(), "device": "cpu", "host_bytes": "8MiB"} | arguments)


def of_manager(name: str) -> Callable[[Any, Path], Any]:
    def make(value: Any, folder: Path) -> None:
        beside: dict[str, Any] = {"host_bytes": None} if name == "host_pool" else {}
        if name.startswith("spill") and name != "spill_dir":
            beside["spill_dir"] = folder
        manager(**beside | {name: value}).close()

    return make


def of_method(method: str, name: str, **right: Any) -> Callable[[Any, Path], Any]:
    def call(value: Any, folder: Path) -> None:
        with manager() as made:
            getattr(made, method)(**right | {name: value})

    return call


def of_register(name: str) -> Callable[[Any, Path], Any]:
    def call(value: Any, folder: Path) -> None:
        optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
        with manager() as made:
            made.register_optimizer(**{"optimizer": optimizer} | {name: value})

    return call


def of_auto(name: str) -> Callable[[Any, Path], Any]:
    return lambda value, folder: TieringManager(**{"device": "cpu", "host_bytes": "8MiB", name: value}).close()


def of_policy(policy: type, name: str, **right: Any) -> Callable[[Any, Path], Any]:
    return lambda value, folder: policy(**right | {name: value})


# What each argument takes of the above.
TAKES: dict[str, tuple[Callable[[Any, Path], Any], set[str]]] = {
    "policy": (of_manager("policy"), set()),
    "device": (of_manager("device"), {"None"}),
    "host_bytes": (of_manager("host_bytes"), {"None"}),
    "pin": (of_manager("pin"), {"True"}),
    "preallocate": (of_manager("preallocate"), {"None", "True"}),
    "host_pool": (of_manager("host_pool"), {"None"}),
    "spill_bytes": (of_manager("spill_bytes"), {"None"}),
    "spill_write_budget": (of_manager("spill_write_budget"), {"None"}),
    "spill_checksum": (of_manager("spill_checksum"), {"None"}),
    "disk": (of_manager("disk"), {"None"}),
    "transfer_stream": (of_manager("transfer_stream"), {"None"}),
    "steps_in_flight": (of_manager("steps_in_flight"), set()),
    "trace": (of_manager("trace"), {"True"}),
    "hold_signals": (of_manager("hold_signals"), {"True"}),
    "attach model": (of_method("attach", "model"), set()),
    "attach min_bytes": (of_method("attach", "min_bytes", model=MODEL), {"None"}),
    "offload_context layers": (of_method("offload_context", "layers"), set()),
    "offload_context min_bytes": (of_method("offload_context", "min_bytes", layers=MODEL), {"None"}),
    "layer_context num_layers": (of_method("layer_context", "num_layers"), set()),
    "layer_context min_bytes": (of_method("layer_context", "min_bytes", num_layers=2), {"None"}),
    "layer_context variable_depth": (of_method("layer_context", "variable_depth", num_layers=2), {"True"}),
    "register_optimizer optimizer": (of_register("optimizer"), set()),
    "register_optimizer bucket_bytes": (of_register("bucket_bytes"), {"None"}),
    "register_optimizer residency": (of_register("residency"), set()),
    "register_optimizer separable": (of_register("separable"), {"None", "True"}),
    "offload thing": (of_method("offload", "thing"), set()),
    "LayerOrderPolicy offload": (of_policy(LayerOrderPolicy, "offload"), {"None"}),
    "LayerOrderPolicy in_flight": (of_policy(LayerOrderPolicy, "in_flight"), {"None"}),
    "LRUPolicy device_bytes": (of_policy(LRUPolicy, "device_bytes"), set()),
    "LRUPolicy read_ahead": (of_policy(LRUPolicy, "read_ahead"), {"None"}),
    "auto device_budget": (of_auto("device_budget"), {"None"}),
    "auto slowdown": (of_auto("slowdown"), {"None", "a fraction"}),
    "PlannedPolicy budget": (of_policy(PlannedPolicy, "budget", link=LINK), set()),
    "PlannedPolicy link": (of_policy(PlannedPolicy, "link", budget="1GiB"), set()),
    "PlannedPolicy fragments": (of_policy(PlannedPolicy, "fragments", budget="1GiB", link=LINK), {"None"}),
    "PlannedPolicy slowdown": (
        of_policy(PlannedPolicy, "slowdown", budget="1GiB", link=LINK),
        {"None", "a fraction"},
    ),
    "PlannedPolicy host_bytes": (of_policy(PlannedPolicy, "host_bytes", budget="1GiB", link=LINK), {"None"}),
    "PlannedPolicy margin": (of_policy(PlannedPolicy, "margin", budget="1GiB", link=LINK), set()),
    "SynchronizationDictPolicy schedule": (of_policy(SynchronizationDictPolicy, "schedule"), set()),
    "SynchronizationDictPolicy order": (
        of_policy(SynchronizationDictPolicy, "order", schedule={0: (True, 1, False, 1)}),
        {"None"},
    ),
}


@pytest.fixture(autouse=True)
def not_left_attached() -> Iterator[None]:
    yield
    assert "forward" not in vars(MODEL)


@pytest.mark.parametrize("argument", TAKES)
def test_garbage_is_refused_at_once_and_the_argument_is_named(argument: str, tmp_path: Path) -> None:
    make, taken = TAKES[argument]
    said = argument.split()[-1].replace("spill_checksum", "checksum").replace("thing", "offload and reload")
    for name, value in GARBAGE.items():
        if name not in taken:
            with pytest.raises((TypeError, ValueError), match=rf"(?i)\b{said}"):
                make(value, tmp_path)


def test_the_device_is_the_accelerator_that_there_is(device: str, caplog: pytest.LogCaptureFixture) -> None:
    with manager(device=None, pin=False) as made:
        assert made.device.kind == device
    assert ("no accelerator on this machine" in caplog.text) == (device == "cpu")


def test_the_message_says_what_is_wanted() -> None:
    with pytest.raises(
        TypeError, match=r"policy must be an object, and LRUPolicy is a class: call it, LRUPolicy\(...\)"
    ):
        manager(policy=LRUPolicy)
    with pytest.raises(TypeError, match="offload must be an int, not the str '20'"):
        LayerOrderPolicy("20")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_flight must be 0 or more, not -1"):
        LayerOrderPolicy(in_flight=-1)
    with pytest.raises(TypeError, match="layers must be a Module, not the int 3"):
        manager().offload_context([3])  # type: ignore[list-item]


def test_the_former_name_of_offload() -> None:
    with pytest.warns(DeprecationWarning, match="is now offload="):
        policy = LayerOrderPolicy(num_layers=2)
    with pytest.raises(ValueError, match=r"LayerOrderPolicy\(offload=2\) offloads more layers than the model has"):
        policy.check(1)
    with (
        pytest.warns(DeprecationWarning, match="is now offload="),
        pytest.raises(TypeError, match="give one of them"),
    ):
        LayerOrderPolicy(2, num_layers=2)
