"""The options: what is refused, where they come from, and what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_emulator import EmulatorError, Fault
from ascend_emulator.options import Options

from emulator.tests.launch import EMULATOR, ROOT, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

WRONG = {
    "an unknown schedule": (
        {"schedule": "sloppy"},
        "unknown schedule 'sloppy'; known are 'eager', 'late' and 'random'",
    ),
    "an unknown stack": ({"stack": "new"}, "unknown stack 'new'; known are 'current' and 'old'"),
    "a negative seed": ({"seed": -1}, "seed must be a whole number from 0 to 18446744073709551615, not -1"),
    "a seed too large": ({"seed": 1 << 64}, "seed must be a whole number from 0 to"),
    "a seed that is no number": ({"seed": "x"}, "seed must be a whole number from 0 to"),
    "half a seed": ({"seed": 0.5}, "seed must be a whole number from 0 to"),
    "no device": ({"devices": 0}, "devices must be a whole number from 1 to 16, not 0"),
    "too many devices": ({"devices": 17}, "devices must be a whole number from 1 to 16, not 17"),
    "races of another kind": ({"races": "yes"}, "races must be True or False"),
    "poison of another kind": ({"poison": 2}, "poison must be True or False"),
    "no memory": ({"hbm_bytes": 0}, "a size must be at least 1 byte, not 0"),
    "a host limit that is no size": ({"host_bytes": "much"}, "'much' is not a size"),
    "a fault of what cannot fail": (
        {"faults": ["aclrtFree:1"]},
        "'aclrtFree' cannot be told to fail; known are aclrtMalloc, ",
    ),
    "a fault without a call": ({"faults": ["aclrtMalloc"]}, "'aclrtMalloc' is not a fault; write it like"),
    "two faults of one function": (
        {"faults": ["device:1", Fault("device", nth=2)]},
        "device has two faults; a function can have one at a time",
    ),
    "a timeline in no folder": ({"timeline": "/nowhere/x.json"}, "the timeline cannot be written to '/nowhere/x"),
    "a timeline that is a folder": ({"timeline": Path("/")}, "the timeline cannot be written to '/'"),
}
ENVIRONMENT = {
    "SCHEDULE": ("Late", "unknown schedule 'Late'; known are"),
    "SEED": ("-1", "seed must be a whole number"),
    "RACES": ("yes", "races must be True or False (1 or 0 in the environment), not 'yes'"),
    "TIMELINE": ("/nowhere/x.json", "the timeline cannot be written"),
}
FLAGS = {
    "--schedule=sloppy": "unknown schedule 'sloppy'",
    "--seed=-1": "seed must be a whole number",
    "--devices=many": "devices must be a whole number from 1 to 16, not 'many'",
    "--host=-1": "'-1' is not a size",
    "--fault=aclrtMallocHostWithCfg:1": "'aclrtMallocHostWithCfg' cannot be told to fail; known are aclrtMalloc, ",
    "--fault=device:0": "the calls of device are counted from 1",
    "--timeline=/nowhere/x.json": "the timeline cannot be written",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_told(case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises(EmulatorError) as caught:
        Options.of(given, {})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_wrong_value_of_the_environment_is_told(name: str) -> None:
    variable, (value, message) = f"ASCEND_EMULATOR_{name}", ENVIRONMENT[name]
    for read in (Options.inherited, lambda environment: Options.of({}, environment)):
        with pytest.raises(EmulatorError) as caught:
            read({variable: value})
        assert str(caught.value).startswith(f"{variable} in the environment: {message}")


def test_what_is_given_comes_before_the_environment() -> None:
    environment = {
        "ASCEND_EMULATOR_SCHEDULE": "late",
        "ASCEND_EMULATOR_SEED": "7",
        "ASCEND_EMULATOR_RACES": "1",
        "ASCEND_EMULATOR_HBM_BYTES": "1",  # a parent's; it is not for the environment to choose
    }
    assert Options.of({}, environment) == Options(schedule="late", seed=7, races=True)
    given = {"schedule": "eager", "seed": 0, "races": False, "hbm_bytes": None}
    assert Options.of(given, environment) == Options()
    assert Options.of({}, dict.fromkeys(environment, "")) == Options()


def test_a_child_reads_what_its_parent_has_written(tmp_path: Path) -> None:
    chosen = Options.of(
        {
            "hbm_bytes": "2GiB",
            "host_bytes": "1MiB",
            "h2d_bytes_per_s": "4GB/s",
            "d2h_bytes_per_s": 5,
            "stack": "old",
            "devices": 3,
            "schedule": "random",
            "seed": 11,
            "races": True,
            "poison": False,
            "faults": ["aclrtMallocHost:3", "aclrtMemcpyAsync:p=0.01,seed=7", "device:100,code=507899"],
            "timeline": tmp_path / "trace.json",
            "clock": "910b2",
            "server": "atlas-a3",
            "host_memory_bytes_per_s": "100GB/s",
            "host_operators": True,
            "over_real_cann": True,
        },
        {},
    )
    assert Options.inherited(chosen.environment()) == chosen
    assert Options.inherited(Options().environment()) == Options()
    assert chosen != Options()


def test_start_changes_nothing_when_a_value_is_wrong(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        from pathlib import Path
        import ascend_emulator

        before = dict(os.environ), list(sys.meta_path)
        for wrong in (
            dict(schedule="sloppy"), dict(seed=-1), dict(devices=0), dict(host_bytes="x"), dict(races=3),
            dict(faults=["aclrtFree:1"]), dict(timeline="/nowhere/x"), dict(stack="new"), dict(hbm_bytes=0),
        ):
            try:
                ascend_emulator.start(**wrong)
            except ascend_emulator.EmulatorError:
                print(*wrong)
        os.environ["ASCEND_EMULATOR_SEED"] = "x"
        try:
            ascend_emulator.start()
        except ascend_emulator.EmulatorError as error:
            print(error)
        del os.environ["ASCEND_EMULATOR_SEED"]
        print("torch" in sys.modules, "libascendcl" in Path("/proc/self/maps").read_text())
        print((dict(os.environ), list(sys.meta_path)) == before)
        """,
    )
    *names, seed, loaded, same = run(script, cwd=tmp_path).stdout.splitlines()
    assert names == [
        "schedule",
        "seed",
        "devices",
        "host_bytes",
        "races",
        "faults",
        "timeline",
        "stack",
        "hbm_bytes",
    ]
    assert seed.startswith("ASCEND_EMULATOR_SEED in the environment: seed must be")
    assert (loaded, same) == ("False False", "True")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_wrong_flag_is_one_clear_line_before_torch_is_loaded(tmp_path: Path, flag: str) -> None:
    (tmp_path / "torch.py").write_text("print('torch was imported')")
    script = write_script(tmp_path, "print('the script ran')")
    done = run(*EMULATOR, flag, script, cwd=tmp_path, pythonpath=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ascend_emulator: {FLAGS[flag]}")
    assert done.stderr.count("\n") == 1


SHOW = """
import os
for name, value in os.environ.items():
    if name.startswith(("ASCEND_EMULATOR_", "TASK_QUEUE")):
        print(name.removeprefix("ASCEND_EMULATOR_"), value)
"""


def shown(tmp_path: Path, *arguments: str, **environment: str) -> dict[str, str]:
    """The emulator's variables in a script's environment."""
    done = run(*arguments, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def test_every_flag_arrives(tmp_path: Path) -> None:
    found = shown(
        tmp_path,
        *EMULATOR,
        *("--hbm", "1MiB", "--host", "2MiB", "--h2d", "3", "--d2h", "4", "--stack", "old", "--devices", "2"),
        *("--schedule", "late", "--seed", "5", "--races", "--no-poison", "--timeline", "trace.json"),
        *("--fault", "device:900", "--fault", "aclrtMalloc:p=0.5,seed=1"),
        *("--clock", "910b", "--server", "dgx-a100", "--host-operators", "--host-memory", "6"),
        write_script(tmp_path, SHOW),
    )
    assert found.pop("STARTED_BY").isdecimal()
    assert found.pop("MODEL").startswith("launch.matrix_us=5.0;")
    assert found == {
        "HBM_BYTES": "1048576",
        "HOST_BYTES": "2097152",
        "H2D_BYTES_PER_S": "3",
        "D2H_BYTES_PER_S": "4",
        "STACK": "old",
        "DRY": "0",
        "DRY_VALUE": "0",
        "DRY_ROUTING": "refused",
        "DEVICES": "2",
        "SCHEDULE": "late",
        "SEED": "5",
        "RACES": "1",
        "POISON": "0",
        "FAULTS": "device:900;aclrtMalloc:p=0.5,seed=1",
        "TIMELINE": str(tmp_path / "trace.json"),
        "CLOCK": "910b3",
        "SERVER": "dgx-a100",
        "HOST_MEMORY_BYTES_PER_S": "6",
        "HOST_OPERATORS": "1",
        "OVER_REAL_CANN": "0",
        "TASK_QUEUE_ENABLE": "0",
    }


def test_a_test_run_can_be_given_another_schedule_from_outside(tmp_path: Path) -> None:
    outside = {"ASCEND_EMULATOR_SCHEDULE": "random", "ASCEND_EMULATOR_SEED": "9"}
    wanted = {"SCHEDULE": "random", "SEED": "9", "TASK_QUEUE_ENABLE": "0", "HBM_BYTES": "1048576"}
    starting = write_script(
        tmp_path, f"import ascend_emulator\nascend_emulator.start(hbm_bytes='1MiB', host_bytes='1MiB')\n{SHOW}"
    )
    assert wanted.items() <= shown(tmp_path, starting, **outside).items()
    # Started twice, the last one counts, but for what it leaves open.
    twice = shown(tmp_path, *EMULATOR, "--hbm", "3GiB", starting, **outside)
    assert wanted.items() <= twice.items()


def test_an_explicit_schedule_counts_more_than_one_from_outside(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    found = shown(tmp_path, *EMULATOR, "--schedule", "eager", script, ASCEND_EMULATOR_SCHEDULE="random")
    assert found["SCHEDULE"] == "eager"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--schedule", "late"), None),
        (("--schedule", "random"), "0"),
        (("--races",), "0"),
        (("--devices", "2"), "0"),
        (("--clock", "910b"), "0"),
    ],
)
def test_torch_npus_queue_is_off_where_it_would_be_in_the_way(
    tmp_path: Path, options: tuple[str, ...], expected: str | None
) -> None:
    script = write_script(tmp_path, SHOW)
    assert shown(tmp_path, *EMULATOR, *options, script).get("TASK_QUEUE_ENABLE") == expected


USE = """
    import ctypes, sys
    sys.path.insert(0, {tests!r})
    from emulator.tests.acl import Acl, byte_at
    acl = Acl()
"""


def using_acl(text: str) -> str:
    """A script that has the runtime as `acl`, and does not import torch."""
    return USE.format(tests=str(ROOT)) + text


def test_devices_host_limit_poison_and_faults_without_torch(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        using_acl("""
    count = ctypes.c_uint32()
    acl.check("aclrtGetDeviceCount", ctypes.byref(count))
    print(count.value, acl.call("aclrtSetDevice", 3), acl.message())
    kept = acl.malloc_host(6 << 20)
    print(byte_at(kept), acl.call("aclrtMallocHost", ctypes.byref(ctypes.c_size_t()), 4 << 20), acl.message())
    print(acl.call("aclrtHostRegisterV2", 4096, 4 << 20, 0), acl.message())
    acl.check("aclrtFreeHost", kept)
    acl.malloc_host(4 << 20)
    acl.malloc(4096)
    print(acl.call("aclrtMalloc", ctypes.byref(ctypes.c_size_t()), 4096, 0), acl.message())
        """),
    )
    options = ("--devices", "3", "--host", "8MiB", "--no-poison", "--fault", "aclrtMalloc:2")
    done = run(*EMULATOR, *options, script, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "3 107001 no device 3 among the 3 emulated; --devices 4 gives as many",
        "0 207001 aclrtMallocHost: needed 4.0 MiB, pinned already 6.0 MiB of 8.0 MiB",
        "207001 aclrtHostRegister: needed 4.0 MiB, pinned already 6.0 MiB of 8.0 MiB",
        "207001 aclrtMalloc: this call was told to fail",
    ], done.stderr


RACE = """
    with acl.streams(2) as streams:
        device = acl.malloc(4096)
        for stream in streams:
            acl.check("aclrtMemsetAsync", device, 4096, 0, 4096, stream)
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("", 66), ("sys.exit(0)", 66), ("sys.exit(7)", 7), ("raise ValueError", 1)]
)
def test_races_are_printed_and_fail_a_script_that_has_not_failed(tmp_path: Path, ending: str, code: int) -> None:
    script = write_script(tmp_path, using_acl(f"{RACE}\n    {ending}\n"))
    done = run(*EMULATOR, "--races", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert "memset" in done.stderr


def test_without_races_nothing_is_said(tmp_path: Path) -> None:
    script = write_script(tmp_path, using_acl(RACE))
    unwatched = run(*EMULATOR, script, cwd=tmp_path)
    assert (unwatched.returncode, unwatched.stderr) == (0, "")
    script = write_script(tmp_path, "print('done')")
    watched = run(*EMULATOR, "--races", script, cwd=tmp_path)
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, "done\n", "")
