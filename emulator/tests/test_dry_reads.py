"""What a dry run tells the host of the device, what it cannot tell, and what it does not go together with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.errors import EmulatorError
from ascend_emulator.options import Options

from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

of_another_process = pytest.mark.slow(why="a process imports torch")
with_either_value = pytest.mark.parametrize("which", ["zero", pytest.param("chosen", marks=of_another_process)])

READ = """
    import json
    import ascend_emulator
    import torch

    x = torch.randn(4, 5, device="npu")
    whole = torch.arange(6, device="npu")
    pinned = torch.full((2, 5), 7.0).pin_memory()
    pinned[:1].copy_(x[:1], non_blocking=True)
    found = {
        "item": x.sum().item(),
        "list": x[0].tolist(),
        "half": x[0].bfloat16().cpu().tolist(),
        "double": x[0].to("cpu", torch.float64).tolist(),
        "whole": whole.cpu().tolist(),
        "complex": [torch.view_as_complex(x[:, :2].contiguous())[0].item().real],
        "finite": [torch.isnan(x).any().item(), torch.equal(x, x), bool(x.sum() > 0)],
        "pinned": pinned.tolist(),
        "host": torch.ones(3).pin_memory().tolist(),
        "text": repr(x.sum()),
    }

    weight = torch.nn.Parameter(torch.ones(5, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scaler = torch.amp.GradScaler("npu")
    for _ in range(3):
        scaler.scale((2 * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    found["steps"] = len(steps)
    torch.npu.synchronize()

    def time(work):
        with ascend_emulator.record_timeline() as spans:
            result = work()
            torch.npu.synchronize()
        result = result[0] if isinstance(result, tuple) else result
        shape = None if result is None else list(result.shape)
        return [shape, [[span.name, span.nbytes] for span in spans]]

    found["cdist"] = time(lambda: torch.cdist(x, x))
    found["unregistered"] = time(lambda: torch._weight_norm_interface(x, x[:, :1]))
    torch._assert_async(x[0, 0] > 0, "told of data")
    found["returned"] = time(lambda: x.geometric_(0.5))
    states = [[torch.zeros(5, device="npu")] for _ in range(4)]
    found["in place"] = time(lambda: torch._fused_adam_(
        *states, [], [torch.zeros((), device="npu")], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False))
    mask, counts = x > 0, torch.ones(4, dtype=torch.int64, device="npu")
    found["refused"] = {}
    for name, work in {
        "nonzero": lambda: torch.nonzero(x),
        "_unique2": lambda: torch.unique(x),
        "masked_select": lambda: torch.masked_select(x, mask),
        "index": lambda: x[mask],
        "bincount": lambda: torch.bincount(whole),
        "repeat_interleave": lambda: torch.repeat_interleave(x, counts, dim=0),
    }.items():
        try:
            found["refused"][name] = str(work().shape)
        except NotImplementedError as error:
            found["refused"][name] = str(error)
    found["known"] = torch.repeat_interleave(x, counts, dim=0, output_size=4).shape
    print(json.dumps(found))
"""


def read(folder: Path, *options: str) -> dict[str, Any]:
    done = run(*EMULATOR, "--clock", "910b3", "--dry", *options, write_script(folder, READ), cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read(tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read(tmp_path_factory.mktemp("chosen"), "--dry-value", "2.5")


def test_the_host_reads_zeros(zero: dict[str, Any]) -> None:
    assert zero["item"] == 0.0
    assert zero["list"] == zero["half"] == zero["double"] == [0.0] * 5
    assert zero["whole"] == [0] * 6
    assert zero["text"] == "tensor(0., device='npu:0')"


@of_another_process
def test_the_host_reads_the_value(chosen: dict[str, Any]) -> None:
    assert chosen["item"] == 2.5
    assert chosen["list"] == chosen["half"] == chosen["double"] == [2.5] * 5
    assert chosen["whole"] == [2] * 6
    assert chosen["complex"] == [2.5]
    assert chosen["text"] == "tensor(2.5000, device='npu:0')"


@with_either_value
def test_no_check_fails_and_gradients_are_finite(which: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(which)
    assert found["finite"] == [False, False, False]
    assert found["steps"] == 3


@with_either_value
def test_pinned_memory_is_zero_where_the_device_wrote_it(which: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(which)
    assert found["pinned"] == [[0.0] * 5, [7.0] * 5]
    assert found["host"] == [1.0] * 3


def test_an_operator_without_a_kernel_is_one_kernel_of_the_right_shape(zero: dict[str, Any]) -> None:
    shape, spans = zero["cdist"]
    assert shape == [4, 4]
    assert spans == [["aten._cdist_forward.default", 4 * 4 * 4]]
    shape, spans = zero["unregistered"]
    assert shape == [4, 5]
    assert spans == [["aten._weight_norm_interface.default", 4 * 4 * 5 + 4 * 4]]
    shape, spans = zero["returned"]
    assert shape == [4, 5]
    assert spans[-1] == ["aten.geometric_.default", 4 * 4 * 5]
    shape, spans = zero["in place"]
    assert shape is None
    assert spans[-1] == ["aten._fused_adam_.default", 4 * 4 * 5]


def test_a_shape_that_depends_on_data_is_refused_by_name(zero: dict[str, Any]) -> None:
    for name, said in zero["refused"].items():
        assert said.startswith(f"aten.{name}.")
        assert "the shape of its result depends on data, of which a dry run has none" in said
    assert zero["known"] == [4, 5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dry": True}, "a dry run takes modelled time alone, so it needs a clock: --clock CHIP (clock=...)"),
        ({"dry": True, "clock": "910b", "races": True}, "a dry run touches no memory, so it has no races; "),
        (
            {"dry": True, "clock": "910b", "schedule": "late"},
            "a dry run computes nothing, now or later, so it has ",
        ),
        ({"dry_value": 1}, "a dry value, and dry routing, are for dry runs: --dry (dry=True)"),
        ({"dry_routing": "uniform"}, "a dry value, and dry routing, are for dry runs: --dry (dry=True)"),
        ({"dry": True, "dry_routing": "even"}, "unknown dry routing 'even'; known are 'refused' and 'uniform'"),
        ({"dry": 3}, "dry must be True or False"),
        ({"dry": True, "clock": "910b", "dry_value": "x"}, "the dry value must be a number, not 'x'"),
        ({"dry": True, "clock": "910b", "dry_value": "nan"}, "the dry value must be a number, not 'nan'"),
    ],
)
def test_what_does_not_go_together_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        Options.of(given, {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_environment_can_choose_it() -> None:
    variables = {
        "ASCEND_EMULATOR_DRY": "1",
        "ASCEND_EMULATOR_DRY_VALUE": "-1",
        "ASCEND_EMULATOR_CLOCK": "910b3",
    }
    chosen = Options.of({}, variables)
    assert chosen == Options(dry=True, dry_value=-1, clock="910b3")
    inherited = Options.inherited(chosen.environment())
    assert (inherited.dry, inherited.dry_value) == (True, -1)
