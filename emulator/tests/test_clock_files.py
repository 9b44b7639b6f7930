"""Chip and server files, and the options that name them: what is refused, and what the runtime is told."""

from __future__ import annotations

from pathlib import Path

import ascend_emulator
import pytest
from ascend_emulator import EmulatorError
from ascend_emulator.options import Options

from emulator.tests.launch import EMULATOR, run, write_script
from emulator.tests.timed import CHIP, SERVER, machine

pytestmark = pytest.mark.once(why="it needs no device")

PACKAGE = Path(ascend_emulator.__file__).parent
CHIPS = ("a100", "h100", "h200", "910b2", "910b3", "910b4", "910c")

WRONG_FILES = {
    "an unknown key": (
        "issue_us = 20",
        "issue_us = 20\nissues = 1",
        "unknown key host.issues; known are server, launch",
    ),
    "an unknown table": ("[step]", "[steps]", "unknown key steps.factor; known are server, launch.matrix_us, "),
    "a key outside of tables": ("[launch]", "launches = 3\n[launch]", "unknown key launches; known are server, "),
    "a missing key": ("wait_us = 30", "", "host.wait_us is missing; needed are server, launch.matrix_us, "),
    "a negative cost": ("event_us = 5", "event_us = -5", "host.event_us must be a number of at least 0, not -5"),
    "a query for nothing": ("query_us = 1", "query_us = 0", "host.query_us must be a number above 0, not 0"),
    "a rate of 0": (
        "bytes_per_s = 1e12",
        "bytes_per_s = 0.0",
        "memory.bytes_per_s must be a number above 0, not 0.0",
    ),
    "an endless rate": (
        "bytes_per_s = 1e12",
        "bytes_per_s = inf",
        "memory.bytes_per_s must be a number above 0, not ",
    ),
    "a rate as text": (
        "bytes_per_s = 1e12",
        "bytes_per_s = '1TB'",
        "memory.bytes_per_s must be a number above 0, not '1",
    ),
    "a rate as truth": ("float32 = 5e12", "float32 = true", "matrix.float32 must be a number above 0, not True"),
    "a share above 1": (
        "share = 0.5\nsoft",
        "share = 1.5\nsoft",
        "memory.share must be a number above 0 and at most 1, ",
    ),
    "a falling table": (
        "[[100, 0.5], [300, 1.0]]",
        "[[300, 1.0], [100, 0.5]]",
        "matrix.matmul_shares must be rows such",
    ),
    "an empty table": (
        "[[100, 0.5], [300, 1.0]]",
        "[]",
        "matrix.matmul_shares must be rows such as [[2048, 0.7], ",
    ),
    "a table of numbers": ("[[100, 0.5], [300, 1.0]]", "[0.5]", "matrix.matmul_shares must be rows such as "),
    "a share of a table": ("[300, 1.0]", "[300, 2]", "matrix.matmul_shares must be rows such as "),
    "an unknown server": ('"atlas-a2"', '"atlas"', "server must be one of atlas-a2, "),
    "no TOML": ("[launch]", "[launch", "cannot be read: "),
}
WRONG_OPTIONS = {
    "an unknown chip": (
        {"clock": "910x"},
        "'910x' is no chip; known are 910b2, 910b3, 910b4, 910c, a100, h100, h200, ",
    ),
    "a file that is not there": ({"clock": "/none.toml"}, "'/none.toml' is no chip; known are "),
    "an unknown server": ({"clock": "910b", "server": "dgx"}, "'dgx' is no server; known are atlas-a2, "),
    "a server without a clock": (
        {"server": "atlas-a2"},
        "a server is there for modelled time, so it needs a clock",
    ),
    "a host memory without a clock": ({"host_memory_bytes_per_s": "1GB/s"}, "the host memory's rate needs a clock"),
    "operators without a clock": ({"host_operators": True}, "what operators cost the host needs a clock"),
}


def model(**given: object) -> dict[str, str]:
    """What the runtime is told."""
    text = Options.of(given, {}).environment()["ASCEND_EMULATOR_MODEL"]
    return dict(figure.split("=") for figure in text.split(";"))


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_chip_file_is_told_in_one_line(tmp_path: Path, case: str) -> None:
    right, wrong, message = WRONG_FILES[case]
    assert CHIP.count(right) == 1
    path = tmp_path / "chip.toml"
    path.write_text(CHIP.replace(right, wrong))
    with pytest.raises(EmulatorError) as caught:
        Options.of({"clock": path}, {})
    text = str(caught.value)
    assert text.startswith((f"{path}: {message}", f"{path} {message}"))
    assert "\n" not in text


def test_a_wrong_server_file_is_told_too(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(SERVER.replace("latency_us = 6", "latency_us = -6"))
    with pytest.raises(EmulatorError) as caught:
        Options.of({"clock": "910b", "server": path}, {})
    assert str(caught.value) == f"{path}: link.latency_us must be a number of at least 0, not -6"


def test_drives_are_known_or_not(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(SERVER.partition("[drives]")[0])
    assert not any(name.startswith("drives") for name in model(clock="910b", server=path))
    path.write_text(SERVER.replace("read_bytes_per_s = 2e9", ""))
    with pytest.raises(EmulatorError) as caught:
        Options.of({"clock": "910b", "server": path}, {})
    assert str(caught.value).startswith(f"{path}: drives.read_bytes_per_s is missing; needed are link.")


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options_are_told(case: str) -> None:
    given, message = WRONG_OPTIONS[case]
    with pytest.raises(EmulatorError) as caught:
        Options.of(given, {})
    assert str(caught.value).startswith(message)


def test_a_chip_without_a_usual_server_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_text(CHIP.replace('server = "atlas-a2"', ""))
    with pytest.raises(EmulatorError) as caught:
        Options.of({"clock": path}, {})
    assert str(caught.value) == f"{path} names no usual server, so one must be given: --server NAME (server=...)"
    assert model(clock=path, server="atlas-a3")["link.h2d_bytes_per_s"] == "33000000000.0"


def test_a_wrong_file_is_one_line_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('torch was imported')")
    machine(tmp_path)
    (tmp_path / "chip.toml").write_text("server = 3\n")
    script = write_script(tmp_path, "print('the script ran')")
    done = run(*EMULATOR, "--clock", "chip.toml", script, cwd=tmp_path, pythonpath=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ascend_emulator: {tmp_path / 'chip.toml'}: server must be one of ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", CHIPS)
def test_each_chip_has_all_figures_and_a_server(name: str) -> None:
    figures = model(clock=name)
    assert len(figures) == (27 if name.startswith("910") else 30)  # of Atlas servers no drives are known
    assert float(figures["link.h2d_bytes_per_s"]) > 1e10


def test_each_server_has_all_figures() -> None:
    names = sorted(path.stem for path in (PACKAGE / "servers").glob("*.toml"))
    assert names == ["atlas-a2", "atlas-a2-fast", "atlas-a3", "dgx-a100", "dgx-h100", "dgx-h200"]
    for name in names:
        assert model(clock="910b2", server=name)["matrix.bfloat16"] == "353900000000000.0"


def test_files_say_where_each_figure_is_from() -> None:
    """Each key has a comment behind it, or above the keys that it stands among."""
    for path in (*(PACKAGE / "chips").glob("*.toml"), *(PACKAGE / "servers").glob("*.toml")):
        said = False
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if not line or line.startswith("#"):
                said = line.startswith("#")
            elif not line.startswith("["):
                assert said or "#" in line, f"{path}:{number}: {line}"


def test_910b_is_another_name() -> None:
    assert Options.of({"clock": "910b"}, {}) == Options.of({"clock": "910b3"}, {})


def test_a_clock_comes_from_the_environment_if_it_is_not_given() -> None:
    environment = {"ASCEND_EMULATOR_CLOCK": "910c", "ASCEND_EMULATOR_SERVER": "dgx-a100"}
    assert Options.of({}, environment) == Options(clock="910c", server="dgx-a100")
    assert Options.of({"clock": "910b2"}, environment).clock == "910b2"
    with pytest.raises(EmulatorError) as caught:
        Options.of({}, {"ASCEND_EMULATOR_CLOCK": "x"})
    assert str(caught.value).startswith("ASCEND_EMULATOR_CLOCK in the environment: 'x' is no chip")


def test_without_a_clock_the_runtime_is_told_nothing() -> None:
    assert Options.of({}, {}).environment()["ASCEND_EMULATOR_MODEL"] == ""


def test_a_child_reads_the_same_machine_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path)
    monkeypatch.chdir(tmp_path)
    chosen = Options.of({"clock": "chip.toml", "server": "server.toml", "host_operators": True}, {})
    monkeypatch.chdir("/")
    assert Options.inherited(chosen.environment()) == chosen
    assert "host.operator_us=3.0" in chosen.environment()["ASCEND_EMULATOR_MODEL"]
