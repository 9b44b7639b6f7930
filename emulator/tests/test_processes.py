"""Several processes and several devices: who has which memory, and how children find the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.test_startup import fake_torch_npu

MIB = 1 << 20

# In place of torch, which takes seconds to import. A child has the device from this import on.
FAKE_TORCH = """
import ctypes
from pathlib import Path

def capacity():
    if "libascendcl" not in Path("/proc/self/maps").read_text():
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert ctypes.CDLL("libascendcl.so").aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value
"""

# Runs child.py, whose output is part of its own.
PARENT = """
    import subprocess, sys
    sys.exit(subprocess.run([sys.executable, "child.py"]).returncode)
"""
CHILD = "import torch; print(torch.capacity())"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script that runs child.py, which prints the capacity of its device."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "child.py").write_text(CHILD)
    write_script(tmp_path, PARENT)
    return tmp_path


def emulated(folder: Path, *options: str) -> str:
    """What the script and its children print."""
    done = run(*EMULATOR, "--hbm", "3MiB", *options, "script.py", cwd=folder, pythonpath=folder / "path")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_child_has_the_device_with_the_same_options(folder: Path) -> None:
    assert emulated(folder) == f"{3 * MIB}\n"


def test_a_child_of_a_program_that_starts_the_device_itself_has_it_too(folder: Path) -> None:
    start = "import ascend_emulator; ascend_emulator.start(hbm_bytes='4MiB')"
    write_script(folder, f"\n    {start}{PARENT}")
    done = run("script.py", cwd=folder, pythonpath=folder / "path")
    assert done.stdout == f"{4 * MIB}\n", done.stderr


def test_a_grandchild_has_the_device_too(folder: Path) -> None:
    (folder / "child.py").rename(folder / "grandchild.py")
    write_script(folder, PARENT.replace("child.py", "grandchild.py"))
    (folder / "script.py").rename(folder / "child.py")
    write_script(folder, PARENT)
    assert emulated(folder) == f"{3 * MIB}\n"


def test_a_child_that_starts_the_device_itself_has_its_own_options(folder: Path) -> None:
    (folder / "child.py").write_text(
        "import ascend_emulator, ctypes\n"
        "ascend_emulator.start(hbm_bytes='5MiB')\n"
        "ascend_emulator.inject('aclrtMalloc:1')\n"
        f"{CHILD}\n"  # the import of torch changes nothing
        "print(ctypes.CDLL('libascendcl.so').aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))\n"
    )
    assert emulated(folder) == f"{5 * MIB}\n207001\n"


def test_the_launcher_in_a_child_has_its_own_options(folder: Path) -> None:
    command = '[sys.executable, "-m", "ascend_emulator", "--hbm", "6MiB", "--timeline", "trace.json", "child.py"]'
    write_script(folder, PARENT.replace('[sys.executable, "child.py"]', command))
    assert emulated(folder) == f"{6 * MIB}\n"
    assert (folder / "trace.json").exists()


def test_a_child_without_torch_is_left_as_it_is(folder: Path) -> None:
    (folder / "child.py").write_text("import sys; print('libascendcl' in open('/proc/self/maps').read(), sys.path)")
    plain = run("child.py", cwd=folder, pythonpath=folder / "path").stdout
    assert plain.startswith("False [")
    assert emulated(folder) == plain


def test_a_child_can_be_left_out(folder: Path) -> None:
    write_script(folder, "\n    import os; del os.environ['ASCEND_EMULATOR_STARTED_BY']" + PARENT)
    assert emulated(folder) == "None\n"


def test_the_users_own_sitecustomize_is_run_too(folder: Path) -> None:
    (folder / "path" / "sitecustomize.py").write_text("print('hello from', __name__)")
    (folder / "child.py").write_text(f"import sitecustomize; print(sitecustomize.__file__); {CHILD}")
    greeting = "hello from sitecustomize\n"  # of the launcher's process, and of the child
    assert emulated(folder) == f"{2 * greeting}{folder}/path/sitecustomize.py\n{3 * MIB}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("os.environ['PYTHONPATH'] += ':elsewhere'", "torch_npu 9.9.9 is not a version that this emulator knows"),
        (
            "os.environ['ASCEND_EMULATOR_SEED'] = 'x'",
            "ASCEND_EMULATOR_SEED in the environment: seed must be a whole",
        ),
    ],
)
def test_a_child_that_cannot_have_the_device_says_so_and_goes_on(folder: Path, change: str, message: str) -> None:
    (folder / "elsewhere").mkdir()
    fake_torch_npu(folder / "elsewhere", "9.9.9")
    write_script(folder, f"\n    import os; {change}{PARENT}")
    done = run(*EMULATOR, "script.py", cwd=folder, pythonpath=folder / "path")
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert done.stderr.startswith(f"ascend_emulator: this child process has no emulated device: {message}")
    assert done.stderr.count("\n") == 1


def test_each_process_writes_a_timeline_of_its_own(folder: Path) -> None:
    (folder / "child.py").write_text("import os, torch; print(os.getpid())")
    pid = emulated(folder, "--timeline", "trace.json").strip()
    assert {file.name for file in folder.glob("*.json")} == {"trace.json", f"trace.{pid}.json"}
    for file in folder.glob("*.json"):
        assert json.loads(file.read_text()) == {"traceEvents": []}


def test_a_child_prints_its_races(folder: Path) -> None:
    (folder / "child.py").write_text(
        f"import sys, torch; sys.path.insert(0, {str(ROOT)!r})\n"
        "from emulator.tests.acl import Acl\n"
        "acl = Acl()\n"
        "device = acl.malloc(4096)\n"
        "with acl.streams(2) as streams:\n"
        "    for stream in streams:\n"
        "        acl.check('aclrtMemsetAsync', device, 4096, 0, 4096, stream)\n"
    )
    done = run(*EMULATOR, "--races", "script.py", cwd=folder, pythonpath=folder / "path")
    assert (done.returncode, done.stdout) == (0, "")
    assert "memset" in done.stderr


# Two devices in one process, which then starts another one. Prints what it finds as JSON.
DEVICES = """
    import json
    import torch
    import torch.multiprocessing

    MIB = 1 << 20

    def in_child(rank, results):
        block = torch.empty(48 * MIB, dtype=torch.uint8, device="npu:1")  # the parent has as much there
        total = (torch.arange(4.0).to("npu:1") + 1).sum().item()
        results.put([torch.npu.device_count(), torch.npu.mem_get_info(1)[1] // MIB, total])

    def error_of(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def main():
        found = {"count": torch.npu.device_count()}
        used = torch.ones(1, device="npu:0")  # what torch_npu has not used, it reports as the current one
        block = torch.empty(48 * MIB - 32, dtype=torch.uint8, device="npu:1")
        found["allocated"] = [torch.npu.memory_allocated(device) // MIB for device in range(2)]
        found["free"] = [torch.npu.mem_get_info(device)[0] // MIB for device in range(2)]
        found["too much"] = error_of(lambda: torch.empty(48 * MIB, dtype=torch.uint8, device="npu:1"))
        found["no device"] = [
            error_of(lambda: torch.npu.set_device(2)), error_of(lambda: torch.ones(1, device="npu:2"))
        ]

        a = torch.arange(12.0, device="npu:0").reshape(3, 4).requires_grad_()
        b = a.t().to("npu:1", torch.bfloat16)
        (b.float() * 2).sum().backward()
        c = torch.zeros(3, 2, device="npu:1").copy_(a.detach()[:, ::2], non_blocking=True)
        found["copies"] = [str(b.device), b.tolist(), c.tolist(), a.grad.tolist(), str(a.grad.device)]

        streams = [torch.npu.Stream(device) for device in range(2)]
        host = torch.full((MIB // 2,), 7, dtype=torch.uint8).pin_memory()
        found["current"] = []
        with torch.npu.stream(streams[1]):
            there = host.to("npu", non_blocking=True)
            found["current"] += [torch.npu.current_device(), str(there.device)]
            landed = streams[1].record_event()
        streams[0].wait_event(landed)
        with torch.npu.stream(streams[0]):
            here = there.to("npu:0")
            found["current"] += [torch.npu.current_device(), str(here.device)]
        streams[0].synchronize()
        found["events"] = [landed.query(), int(here.sum(dtype=torch.int64))]

        context = torch.multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        torch.multiprocessing.spawn(in_child, (results,), nprocs=1)
        found["child"] = results.get()
        print(json.dumps(found))

    if __name__ == "__main__":
        main()
"""


on_two_devices = pytest.mark.slow(why="two processes import torch")


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("devices")
    script = write_script(folder, DEVICES)
    done = run(*EMULATOR, "--devices", "2", "--hbm", "64MiB", script, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@on_two_devices
def test_each_device_has_its_own_memory(devices: dict[str, Any]) -> None:
    assert devices["count"] == 2
    assert devices["allocated"] == [0, 48]
    assert devices["free"] == [62, 16]  # torch_npu takes small tensors from blocks of 2 MiB
    assert devices["too much"].startswith("OutOfMemoryError: ")


@on_two_devices
def test_a_device_that_does_not_exist_is_an_error(devices: dict[str, Any]) -> None:
    for error in devices["no device"]:
        assert error.startswith("RuntimeError: ")
        assert "no device 2 among the 2 emulated" in error


@on_two_devices
def test_copies_between_devices(devices: dict[str, Any]) -> None:
    assert devices["copies"] == [
        "npu:1",
        [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]],
        [[0, 2], [4, 6], [8, 10]],
        [[2] * 4] * 3,
        "npu:0",
    ]


@on_two_devices
def test_streams_and_events_belong_to_their_device(devices: dict[str, Any]) -> None:
    assert devices["current"] == [1, "npu:1", 0, "npu:0"]
    assert devices["events"] == [True, 7 * MIB // 2]


@on_two_devices
def test_a_spawned_process_has_the_devices_with_memory_of_its_own(devices: dict[str, Any]) -> None:
    assert devices["child"] == [2, 64, 10.0]


@pytest.mark.slow(why="three processes import torch")
def test_two_ranks_train_the_same_model_each_on_its_own_device(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        import torch
        from torch import distributed

        rank = int(os.environ["LOCAL_RANK"])
        torch.npu.set_device(rank)
        distributed.init_process_group("gloo")
        taken = torch.empty(48 << 20, dtype=torch.uint8, device="npu:0")  # of 64 MiB, by both ranks

        torch.manual_seed(rank)  # so that each starts with weights of its own
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to("npu")

        def across_ranks(tensor, collective, *arguments):
            on_cpu = tensor.cpu()
            collective(on_cpu, *arguments)
            tensor.copy_(on_cpu)

        for parameter in model.parameters():
            across_ranks(parameter.detach(), distributed.broadcast, 0)
        inputs, losses = torch.randn(32, 8).to("npu"), []
        for step in range(5):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            losses.append(loss.item())
            loss.backward()
            for parameter in model.parameters():
                across_ranks(parameter.grad, distributed.all_reduce)
                parameter.data -= 0.01 * parameter.grad
                parameter.grad = None

        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
        gathered = [None, None]
        distributed.all_gather_object(gathered, (torch.npu.current_device(), weights, losses))
        if rank == 0:
            (first, w0, losses0), (second, w1, losses1) = gathered
            print(first, second, w0 == w1, losses0 != losses1)
            print(losses0[-1] + losses1[-1] < losses0[0] + losses1[0])
        distributed.destroy_process_group()
        """,
    )
    distributed = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(
        *EMULATOR, "--devices", "2", "--hbm", "64MiB", *distributed, script, cwd=tmp_path, GLOO_SOCKET_IFNAME="lo"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 True True\nTrue\n"
