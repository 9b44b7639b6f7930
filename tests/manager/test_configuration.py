"""The manager of a process without a place for one: made at first use, of what it was told and the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_mem
from tiered_mem import TieringManager
from tiered_mem.configuration import DefaultManager, arguments_of
from tiered_mem.errors import TieredMemError

ROOT = Path(__file__).parents[2]


def test_the_environment_gives_the_arguments() -> None:
    environment = {
        "HOME": "/root",
        "TIERED_MEM_POLICY": "lru",
        "TIERED_MEM_HOST_BYTES": "0.25",
        "TIERED_MEM_SPILL_BYTES": "2GiB",
        "TIERED_MEM_PIN": "False",
        "TIERED_MEM_TRACE": "yes",
        "TIERED_MEM_STEPS_IN_FLIGHT": "1",
        "TIERED_MEM_HOLD_SIGNALS": "no",
        "TIERED_MEM_HOST_LIMIT": "8GiB",
    }
    assert arguments_of(environment) == {
        "policy": "lru",
        "host_bytes": 0.25,
        "spill_bytes": "2GiB",
        "pin": False,
        "trace": True,
        "steps_in_flight": 1,
        "hold_signals": False,
    }


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TIERED_MEM_HOST_BYTE", "1GiB", "is it TIERED_MEM_HOST_BYTES?"),
        ("TIERED_MEM_X", "red", "there are TIERED_MEM_POLICY"),
        ("TIERED_MEM_HOST_BYTES", "much", "TIERED_MEM_HOST_BYTES is 'much': 'much' is not a size"),
        (
            "TIERED_MEM_DEVICE_BUDGET",
            "9" * 500,
            f"TIERED_MEM_DEVICE_BUDGET is '{'9' * 40}...': a size is written like",
        ),
        ("TIERED_MEM_STEPS_IN_FLIGHT", "two", "TIERED_MEM_STEPS_IN_FLIGHT is 'two': write a whole number"),
        ("TIERED_MEM_TRACE", "maybe", "TIERED_MEM_TRACE is 'maybe': write one of 1, true"),
        ("TIERED_MEM_SLOWDOWN", "a bit", "TIERED_MEM_SLOWDOWN is 'a bit': write a number such as 0.05"),
    ],
)
def test_what_means_nothing_is_refused_by_name(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        DefaultManager({variable: value}).get()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POLICY", "lur"),
        ("HOST_BYTES", "900TiB"),
        ("HOST_BYTES", "2.5"),
        ("SPILL_DIR", "/no/such/folder"),
        ("SPILL_CHECKSUM", "md5"),
        ("PIN", "some"),
        ("SLOWDOWN", "inf"),
        ("STEPS_IN_FLIGHT", "0"),
        ("DEVICE", "xpu"),
    ],
)
def test_what_the_manager_refuses_names_the_variable(variable: str, value: str) -> None:
    says = {"TIERED_MEM_DEVICE": "cpu", f"TIERED_MEM_{variable}": value}
    with pytest.raises((ValueError, TieredMemError), match=f"In the environment there is .*{variable}={value}"):
        DefaultManager(says).get()


def test_what_the_program_says_is_not_blamed_on_the_environment() -> None:
    default = DefaultManager({"TIERED_MEM_POLICY": "nonsense"})
    default.configure(policy="lur", device="cpu")
    with pytest.raises(ValueError, match="unknown policy 'lur'") as caught:
        default.get()
    assert "TIERED_MEM" not in str(caught.value)


def test_it_is_made_at_first_use_of_both(device: str) -> None:
    default = DefaultManager({"TIERED_MEM_POLICY": "nonsense", "TIERED_MEM_HOST_BYTES": "16MiB"})
    default.configure(policy="layer-order")
    default.configure(device=device)
    with default.get() as manager:
        assert isinstance(manager, TieringManager)
        assert manager.stats()["host.capacity"] == 16 << 20
        assert default.get() is manager
        with pytest.raises(RuntimeError, match="made already"):
            default.configure(policy="lru")


def test_a_name_that_is_no_argument_is_refused_when_it_is_said() -> None:
    with pytest.raises(TypeError, match="host_byte"):
        tiered_mem.configure(host_byte="1GiB")


@pytest.mark.slow(why="a process of its own")
@pytest.mark.schedules("eager", why="a process of its own")
def test_it_is_closed_with_the_process(tmp_path: Path, device: str) -> None:
    code = (
        "import tiered_mem; tiered_mem.optim; "
        "tiered_mem.default_manager(); import os; print(len(os.listdir(os.environ['TIERED_MEM_SPILL_DIR'])))"
    )
    emulator = ["-m", "ascend_emulator"] if device.startswith("npu") else []
    says = {"POLICY": "layer-order", "DEVICE": device, "HOST_BYTES": "16MiB", "SPILL_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *emulator, "-c", code],
        cwd=ROOT,
        env=os.environ | {f"TIERED_MEM_{name}": value for name, value in says.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "1"
    assert list(tmp_path.iterdir()) == []
