"""torch.distributed.checkpoint saves and loads a tiered optimizer as it does one of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.models import Stack
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import Outcome, differences, give_gradients, on_cpu, outcome
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.once(why="what a checkpoint holds is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]
RESIDENCIES = ("disk", "host", "device-until-offload")


class Trainee:
    """A model and its optimizer. residency: None for an unwrapped one."""

    def __init__(self, residency: str | None, make_tiered: MakeTiered, device: str = KIND) -> None:
        torch.manual_seed(0)
        self.model = Stack(2, 16).to(device)
        decayed = [param for param in self.model.parameters() if param.ndim > 1]
        others = [param for param in self.model.parameters() if param.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
        self.optimizer: Optimizer = torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)
        if residency is not None:
            self.optimizer = make_tiered(self.optimizer, residency=residency, device=device, bucket_bytes="32KiB")

    def train(self, *steps: int) -> Trainee:
        for step in steps:
            give_gradients(list(self.model.parameters()), step, missing=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def saved(self) -> dict[str, Any]:
        """What dcp is to save, or to load into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def set(self, saved: dict[str, Any]) -> Trainee:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        return self

    def load(self, folder: Path) -> Trainee:
        saved = self.saved()
        dcp.load(saved, checkpoint_id=folder, no_dist=True)
        return self.set(saved)

    def differs(self, other: Trainee) -> list[str]:
        mine, others = (outcome(each.optimizer, list(each.model.parameters())) for each in (self, other))
        return differences(mine, others)


@pytest.fixture(params=RESIDENCIES)
def residency(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_its_state_dict_by_names_is_that_of_an_unwrapped_one(
    residency: str, stepped: bool, flat: bool, make_tiered: MakeTiered
) -> None:
    """Before any step torch makes one itself, with gradients of zeros."""
    results = []
    for each in (None, residency):
        trainee = Trainee(each, make_tiered)
        if stepped:
            trainee.train(0, 1)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        results.append(
            Outcome([], on_cpu(get_optimizer_state_dict(trainee.model, trainee.optimizer, options=options)))
        )
    assert not differences(*results)


@pytest.mark.parametrize("tiered_first", [False, True], ids=["from unwrapped", "to unwrapped"])
@pytest.mark.parametrize("fresh", [False, True], ids=["stepped", "fresh"])
def test_states_are_handed_over_by_names(
    residency: str, tiered_first: bool, fresh: bool, make_tiered: MakeTiered
) -> None:
    of, to = (residency, None) if tiered_first else (None, residency)
    first = Trainee(of, make_tiered).train(0, 1, 2)
    second = Trainee(to, make_tiered)
    if not fresh:
        second.train(7, 8)
    second.model.load_state_dict(first.model.state_dict())
    by_name = get_optimizer_state_dict(first.model, first.optimizer)
    assert "layers.0.up.weight" in by_name["state"]
    set_optimizer_state_dict(second.model, second.optimizer, by_name)
    assert not first.differs(second)
    assert not first.train(3, 4, 5).differs(second.train(3, 4, 5))


@pytest.mark.slow(why="16 pairs; test_checkpoints.py has them with files of torch.save")
@pytest.mark.parametrize("of", [None, *RESIDENCIES])
@pytest.mark.parametrize("to", [None, *RESIDENCIES])
def test_a_checkpoint_is_loaded_in_another_residency(
    of: str | None, to: str | None, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    first = Trainee(of, make_tiered).train(0, 1, 2)
    dcp.save(first.saved(), checkpoint_id=tmp_path, no_dist=True)
    second = Trainee(to, make_tiered).load(tmp_path)
    expected = Trainee(None, make_tiered).train(0, 1, 2)
    assert not expected.differs(second)
    assert not expected.train(3, 4, 5).differs(second.train(3, 4, 5))


class Waiting(dcp.FileSystemWriter):
    """Writes only when it is told to go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        assert self.go.wait(30)
        return super().write_data(*arguments, **options)


def test_steps_after_async_save_do_not_change_what_is_saved(
    residency: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    """Three steps are made before the first byte is written."""
    first = Trainee(residency, make_tiered).train(0, 1, 2)
    writer = Waiting(tmp_path)
    future = dcp.async_save(first.saved(), storage_writer=writer, no_dist=True)
    first.train(3, 4, 5)
    writer.go.set()
    assert not isinstance(future, dcp.state_dict_saver.AsyncSaveResponse)
    future.result()
    second = Trainee(residency, make_tiered).load(tmp_path)
    assert not Trainee(None, make_tiered).train(0, 1, 2).differs(second)
    assert not first.differs(second.train(3, 4, 5))


def test_a_save_beside_training_needs_no_copy_of_the_states(
    residency: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    """They are a snapshot already: whoever writes them himself may step at once."""
    first = Trainee(residency, make_tiered).train(0, 1, 2)
    saved = {"optimizer": first.saved()["optimizer"]}
    writer = Waiting(tmp_path)
    thread = threading.Thread(target=dcp.save, args=(saved,), kwargs={"storage_writer": writer, "no_dist": True})
    thread.start()
    first.train(3, 4, 5)
    writer.go.set()
    thread.join()
    second = Trainee(residency, make_tiered)
    loaded = {"optimizer": second.saved()["optimizer"]}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    expected = Trainee(None, make_tiered).train(0, 1, 2)
    assert not differences(
        Outcome([], loaded["optimizer"]),
        Outcome([], on_cpu(get_optimizer_state_dict(expected.model, expected.optimizer))),
    )


@pytest.fixture
def mesh(device: str, tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'rendezvous'}")
    yield DeviceMesh(device, [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_states_of_dtensors_are_dtensors(
    residency: str, placement: Any, mesh: DeviceMesh, device: str, make_tiered: MakeTiered
) -> None:
    """On the CPU in a state_dict, though their mesh is of the device."""
    results = []
    for each in (None, residency):
        torch.manual_seed(0)
        parts = [torch.randn(6, 4).to(device), torch.randn(0, 3).to(device), torch.randn(5).to(device)]
        params = [torch.nn.Parameter(DTensor.from_local(part, mesh, [placement])) for part in parts]
        optimizer: Optimizer = torch.optim.AdamW(params, lr=1e-2)
        if each is not None:
            optimizer = make_tiered(optimizer, residency=each)
        for step in range(6):
            for number, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * step + number)
                gradient = torch.randn(param.to_local().shape, generator=generator).to(device)
                param.grad = DTensor.from_local(gradient, mesh, [placement])
            optimizer.step()
            if step == 3:
                saved = optimizer.state_dict()
                optimizer.load_state_dict(saved)
        for index, param in enumerate(params):
            mean = saved["state"][index]["exp_avg"]
            assert type(mean) is DTensor
            assert (mean.device_mesh, mean.placements, mean.shape) == (mesh, (placement,), param.shape)
            if isinstance(optimizer, TieredOptimizer):
                assert mean.to_local().is_cpu
                assert optimizer.state[param]["exp_avg"].to_local().is_cpu
        plain = [{k: local(v) for k, v in optimizer.state[param].items()} for param in params]
        results.append(Outcome([local(param) for param in params], {"states": plain}))
    assert not differences(*results)


def test_a_plain_state_is_not_made_a_dtensor(
    residency: str, mesh: DeviceMesh, device: str, make_tiered: MakeTiered
) -> None:
    """Who loads one for a DTensor gets it back, and the step that cannot use it says so, as in torch."""
    for each in (None, residency):
        param = torch.nn.Parameter(DTensor.from_local(torch.ones(6, 4, device=device), mesh, [Shard(0)]))
        plain = torch.nn.Parameter(torch.ones(6, 4, device=device))
        param.grad, plain.grad = torch.ones_like(param), torch.ones_like(plain)
        of_plain = torch.optim.AdamW([plain])
        of_plain.step()
        optimizer: Optimizer = torch.optim.AdamW([param])
        if each is not None:
            optimizer = make_tiered(optimizer, residency=each)
        optimizer.step()
        optimizer.load_state_dict(of_plain.state_dict())
        assert type(optimizer.state[param]["exp_avg"]) is torch.Tensor
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__ or caught.value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has, on the CPU."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()
