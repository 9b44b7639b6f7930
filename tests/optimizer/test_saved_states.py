"""States that are saved into files and loaded from them are those that a state_dict has."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Counting, Growing, OutOfPlace, ScheduleFree, WithRate
from tests.optimizer.trainee import Trainee, tiered
from tests.optimizer.training import (
    PLACES,
    Outcome,
    Place,
    differences,
    give_gradients,
    make_params,
    on_cpu,
    outcome,
)
from tiered_mem.optimizer.saved_index import INDEX
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # of torch's copies of groups
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning"),  # of torch_npu's
]
once = pytest.mark.once(why="what files hold is the same in each schedule")
ON_A_DEVICE = pytest.mark.skipif(KIND == "cpu", reason="on the cpu the step counts, too, are states to be moved")
KINDS = ("adamw", "adamw-amsgrad", "adam-fused", "sgd", "sgd-momentum", "adafactor", "nadam")
HOST = Place("host")


class Thorough(WithRate):
    """Has everything in its states and groups that files can hold, and counts on all of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group |= {"span": (0.1, [1, None]), "kind": torch.bfloat16, "most": float("inf"), "rate": torch.ones(2)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state.setdefault("all", {"steps": 0})["steps"] += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"low": None, "name": "a.b", "even": True, "least": float("-inf"), "pair": (0, 1.5)}
                    state |= {"by": {0: {"$tensor": "text"}}, "none": param.new_empty(0), "lags": [param.clone()]}
                    state["mean.0"] = param.new_zeros(param.shape).T if param.ndim == 2 else torch.zeros_like(param)
                    state["mean"] = {"0": torch.zeros(1), 1: torch.ones_like(param, dtype=torch.int64)}
                low = torch.zeros_like(param) if state["low"] is None else state["low"].to(param.dtype)
                lag = state["lags"].pop(0).lerp(low + param.grad, 0.5)
                state["lags"] = [*state["lags"], lag][-2:]
                state["low"] = lag.clamp(-4, 4).to(torch.float8_e4m3fn)
                state["mean"]["0"] += 1
                state["mean"][1] += 1
                state["even"] = not state["even"]
                state["pair"] = (state["pair"][0] + 1, torch.full((2,), state["pair"][0]))
                mean = state["mean.0"].T if param.ndim == 2 else state["mean.0"]
                mean.lerp_(lag, 0.1)
                scale = group["lr"] * group["rate"][0].item() / (state["mean"]["0"].item() + state["pair"][0])
                param.sub_(mean * state["mean"][1] + state["even"], alpha=scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        params = [param for group in self.param_groups for param in group["params"]]
        for name, state in state_dict["state"].items():
            if isinstance(name, int):
                device = params[name].device
                kept = {"mean": {"0": state["mean"]["0"].clone(), 1: state["mean"][1].to(device)}}
                kept["lags"] = [each.to(device) for each in state["lags"]]
                kept |= {key: state[key].to(device) for key in ("low", "mean.0", "none")}
                self.state[params[name]] = {**state, **kept}
            else:
                self.state[name] = state


class Nested(WithRate):
    """Keeps its means in lists in dictionaries, and steps all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [
            param.grad.norm() for group in self.param_groups for param in group["params"] if param.grad is not None
        ]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("means", {"all": []})["all"].append(param.grad / sum(grads))
                    param.sub_(torch.stack(state["means"]["all"]).mean(0), alpha=group["lr"])


def bfloat16(params: Any) -> Optimizer:
    for param in params:
        param.data = param.data.bfloat16()
    return torch.optim.AdamW(params)


def several_groups(params: Any) -> Optimizer:
    """One of them is of frozen parameters, and one has a rate that is a tensor."""
    params[1].requires_grad_(False)
    named = [(f"layer.{index}.weight", param) for index, param in enumerate(params)]
    groups = [{"params": named[:2]}, {"params": named[2:4], "lr": torch.tensor(0.01)}, {"params": named[4:]}]
    return torch.optim.Adam(groups, lr=0.1, betas=(0.5, 0.9), foreach=False)


def with_closure(params: Any) -> Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=3)


STRANGE = (Counting, Growing, OutOfPlace, ScheduleFree, Nested, Thorough, bfloat16, several_groups)


def named(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def saved_by(trainee: Trainee, folder: Path) -> list[torch.Tensor]:
    """The weights beside what is in the files."""
    tiered(trainee).save(folder)
    return [param.detach().cpu().clone() for param in trainee.params]


def resumed(trainee: Trainee, folder: Path, weights: list[torch.Tensor]) -> Trainee:
    trainee.set_weights(weights)
    tiered(trainee).load(folder)
    return trainee.settle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", PLACES, ids=str)
def test_training_goes_on_to_the_bit(kind: str, to: Place, tmp_path: Path, make_tiered: MakeTiered) -> None:
    """From any residency into any other, with other buckets, and whatever is there is gone."""
    place = PLACES[PLACES.index(to) - 1]
    weights = saved_by(Trainee(place, make_tiered, kind).train(0, 1, 2), tmp_path / "saved")
    after = Trainee(to, make_tiered, kind, bucket_bytes=700).train(7, 8)
    after = resumed(after, tmp_path / "saved", weights).train(3, 4, 5)
    expected = Trainee(None, make_tiered, kind).train(0, 1, 2, 3, 4, 5)
    assert not expected.differs(after)


@once
@pytest.mark.parametrize("kind", STRANGE, ids=named)
@pytest.mark.parametrize("device", list(dict.fromkeys((KIND, "cpu"))))
def test_it_is_what_a_state_dict_would_be(
    kind: Callable[..., Optimizer], device: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    before = Trainee(HOST, make_tiered, kind, device).train(0, 1, 2)
    weights, state_dict = saved_by(before, tmp_path), before.optimizer.state_dict()
    by_files, by_state_dict = (Trainee(HOST, make_tiered, kind, device) for _ in range(2))
    resumed(by_files, tmp_path, weights)
    by_state_dict.set_weights(weights)
    by_state_dict.optimizer.load_state_dict(state_dict)
    for _ in range(2):
        assert tiered(by_files).at_once is tiered(by_state_dict).at_once
        assert not by_state_dict.differs(by_files)
        assert devices_of(by_files.optimizer) == devices_of(by_state_dict.optimizer)
        for each in (by_files, by_state_dict):
            each.train(3, 4)


def devices_of(optimizer: Optimizer) -> list[Any]:
    assert isinstance(optimizer, TieredOptimizer)
    with optimizer.present() as wrapped:
        return [
            [
                str(value.device)
                for value in wrapped.state.get(param, {}).values()
                if isinstance(value, torch.Tensor)
            ]
            for group in wrapped.param_groups
            for param in group["params"]
        ]


@once
def test_an_optimizer_that_needs_a_closure(device: str, tmp_path: Path, make_tiered: MakeTiered) -> None:
    """Its states have lists, numbers and None."""

    def steps(trainee: Trainee, *numbers: int) -> Trainee:
        for number in numbers:

            def closure(number: int = number) -> float:
                give_gradients(trainee.params, number, missing=False)
                return sum(param.detach().square().sum().item() for param in trainee.params)

            trainee.optimizer.step(closure)
        return trainee

    before = steps(Trainee(HOST, make_tiered, with_closure), 0, 1)
    after = resumed(Trainee(HOST, make_tiered, with_closure), tmp_path, saved_by(before, tmp_path))
    assert not before.differs(after)
    assert not steps(Trainee(None, make_tiered, with_closure), 0, 1, 2).differs(steps(after, 2))


@once
def test_what_has_no_state_yet_has_none_afterwards(place: Place, tmp_path: Path, make_tiered: MakeTiered) -> None:
    weights = saved_by(Trainee(place, make_tiered), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [INDEX]
    after = resumed(Trainee(place, make_tiered).train(0, 1), tmp_path, weights)
    assert after.optimizer.state_dict()["state"] == {}
    assert not Trainee(None, make_tiered).train(2, 3).differs(after.train(2, 3))


@once
def test_states_that_partly_stay_on_the_device(device: str, tmp_path: Path, make_tiered: MakeTiered) -> None:
    """As with residency="auto"."""
    before = Trainee(HOST, make_tiered, bucket_bytes=700).train(0, 1)
    states = tiered(before).states
    assert states.keep(4000)
    before.train(2)
    assert 0 < states.pipeline.kept < states.pipeline.nbytes
    after = resumed(Trainee(HOST, make_tiered), tmp_path, saved_by(before, tmp_path))
    assert states.pipeline.kept
    assert not before.differs(after)


@once
def test_everybody_can_read_the_files(device: str, tmp_path: Path, make_tiered: MakeTiered) -> None:
    trainee = Trainee(HOST, make_tiered, several_groups).train(0, 1, 2)
    tiered(trainee).save(tmp_path)
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.rglob("*.safetensors"):
        found |= load_file(path)
        assert path.stat().st_mode & 0o777 == (tmp_path / INDEX).stat().st_mode & 0o777
    expected = trainee.optimizer.state_dict()
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found.pop(f"{number}.{key}"), value)
    assert [*found] == ["group.1.lr"]
    index = json.loads((tmp_path / INDEX).read_text())
    assert [group["params"] for group in index["groups"]] == [[0, 1], [2, 3], [4]]
    assert index["groups"][1]["param_names"] == ["layer.2.weight", "layer.3.weight"]
    assert index["groups"][2]["lr"] == expected["param_groups"][2]["lr"]


class HostMemory(TorchDispatchMode):
    """Sees what operators allocate in pageable host memory. most: at a time, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._there: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in tensors_of((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in () if func._schema.is_mutable else tensors_of(result):
            storage = tensor.untyped_storage()
            if tensor.is_cpu and storage._cdata not in before and storage.filename is None:
                self._there.append((StorageWeakRef(storage), storage.nbytes()))
        self._there = [each for each in self._there if not each[0].expired()]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._there))
        return result


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def host_peak(work: Callable[[], object]) -> int:
    """The most pageable host memory that is taken at a time, by torch and by Python. Mapped files take none."""
    gc.collect()
    tracemalloc.start()
    try:
        with HostMemory() as seen:
            work()
        _, python = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return seen.most + python


@once
@ON_A_DEVICE
@pytest.mark.parametrize("residency", ["host", "disk", "device-until-offload"])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_host_holds_one_bucket_at_most(
    residency: str, at_once: bool, device: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    bucket, count = 2 << 20, 24

    def make() -> TieredOptimizer:
        params = make_params(device, shapes=[(512, 256)] * count)  # whose states take half of a bucket each
        optimizer = make_tiered(torch.optim.AdamW(params), residency=residency, bucket_bytes=2 * bucket)
        optimizer.states.at_once |= at_once
        give_gradients(params, 0, missing=False)
        return optimizer

    before, after = make(), make()
    before.step()
    assert before.states.pipeline.nbytes == count * bucket // 2
    spare = bucket // 2  # for names, the index, and the like
    assert host_peak(lambda: before.save(tmp_path)) < bucket + spare
    assert host_peak(lambda: after.load(tmp_path)) < bucket + spare
    assert host_peak(before.state_dict) > 8 * bucket, "the measurement sees what a state_dict takes"
    mine, others = (on_cpu(each.state_dict()) for each in (before, after))
    assert not differences(Outcome([], mine), Outcome([], others))


@once
@ON_A_DEVICE
def test_files_are_as_large_as_half_of_bucket_bytes(tmp_path: Path, make_tiered: MakeTiered) -> None:
    """Also of states that are on the CPU, and in no bucket."""
    params = make_params("cpu", shapes=[(100, 100)] * 20)
    params.append(torch.nn.Parameter(torch.zeros(3, device=KIND)))
    optimizer = make_tiered(torch.optim.AdamW(params), bucket_bytes=400_000)
    give_gradients(params, 0, missing=False)
    optimizer.step()
    optimizer.save(tmp_path)
    sizes = []
    for path in tmp_path.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys()))  # noqa: SIM118 - no dictionary
    assert sum(sizes) == 20 * 80_004 + 28
    assert max(sizes) <= 200_000 + 65_536
    assert len(sizes) < 9


@once
def test_a_loaded_optimizer_needs_the_files_no_more(device: str, tmp_path: Path, make_tiered: MakeTiered) -> None:
    for kind in ("adamw", Nested):
        folder = tmp_path / named(kind)
        after = resumed(
            Trainee(HOST, make_tiered, kind), folder, saved_by(Trainee(HOST, make_tiered, kind).train(0), folder)
        )
        for path in folder.rglob("*.safetensors"):
            path.write_bytes(bytes(path.stat().st_size))
        assert not Trainee(None, make_tiered, kind).train(0, 1).differs(after.train(1))
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps


@once
def test_what_is_saved_does_not_change_the_optimizer(place: Place, tmp_path: Path, make_tiered: MakeTiered) -> None:
    trainee = Trainee(place, make_tiered)
    for step in range(4):
        trainee.train(step)
        before = outcome(trainee.optimizer, trainee.params)
        tiered(trainee).save(tmp_path)
        assert not differences(before, outcome(trainee.optimizer, trainee.params))
    assert len(list(tmp_path.glob("states-*"))) == 1
    assert not Trainee(None, make_tiered).train(0, 1, 2, 3).differs(trainee)
