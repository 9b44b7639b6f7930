"""Files of saved states: what is refused, and what is left when something fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from emulator.tests.launch import run
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import MasterWeights, WithRate
from tests.optimizer.test_own_tensor_types import Coded
from tests.optimizer.training import OPTIMIZERS, Outcome, differences, give_gradients, make_params, outcome, train
from tiered_mem import Closed, CorruptRecord, Reentered
from tiered_mem.optimizer import saved_states
from tiered_mem.optimizer.saved_folder import FolderOfSave
from tiered_mem.optimizer.saved_index import INDEX, read_index
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = pytest.mark.once(why="what files hold is the same in each schedule")
ROOT = Path(__file__).parents[2]
Params = list[torch.nn.Parameter]


class Trained:
    """An optimizer that has made some steps."""

    def __init__(self, optimizer: TieredOptimizer, params: Params, *steps: int) -> None:
        self.optimizer, self.params = optimizer, params
        train(optimizer, params, steps)

    def now(self) -> Outcome:
        return outcome(self.optimizer, self.params)


@pytest.fixture
def trained(device: str, make_tiered: MakeTiered) -> Trained:
    params = make_params(device)
    return Trained(make_tiered(OPTIMIZERS["adamw"](params), bucket_bytes=2000), params, 0, 1)


@pytest.fixture
def other(device: str, make_tiered: MakeTiered) -> Trained:
    """One that is to load, and has states itself."""
    params = make_params(device)
    return Trained(make_tiered(OPTIMIZERS["adamw"](params)), params, 5)


@pytest.fixture
def folder(trained: Trained, tmp_path: Path) -> Path:
    """What it has saved."""
    trained.optimizer.save(tmp_path / "saved")
    return tmp_path / "saved"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@contextmanager
def unchanged(trained: Trained) -> Iterator[None]:
    before, groups = trained.now(), [dict(group) for group in trained.optimizer.param_groups]
    yield
    assert not differences(before, trained.now())
    assert [dict(group) for group in trained.optimizer.param_groups] == groups
    trained.optimizer.state_dict()  # raises InterruptedStep where a load was left in the middle


# What is not as it was written.


def test_each_byte_of_the_index_counts(folder: Path) -> None:
    good = (folder / INDEX).read_bytes()
    assert read_index(folder).optimizer == "AdamW"
    for place in (*range(100), *range(100, len(good), 7)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        (folder / INDEX).write_bytes(data)
        with pytest.raises(CorruptRecord, match=INDEX):
            read_index(folder)
    (folder / INDEX).write_bytes(good[:-1])
    with pytest.raises(CorruptRecord, match="checksum of the index: expected"):
        read_index(folder)


def test_each_byte_of_the_data_counts(folder: Path, other: Trained) -> None:
    """Of the header those that say something: safetensors ends it with spaces."""
    for path in shards(folder):
        good = path.read_bytes()
        length = int.from_bytes(good[:8], "little")
        text = good[8 : 8 + length]
        header, data_places = range(8, 8 + len(text.rstrip()), 23), range(8 + length, len(good), 97)
        for place in (*range(8), *header, *data_places, len(good) - 1):
            data = bytearray(good)
            data[place] ^= 16
            path.write_bytes(data)
            with unchanged_groups(other), pytest.raises(CorruptRecord, match=f"{path}: .*expected .*found "):
                other.optimizer.load(folder)
        path.write_bytes(good)
    with unchanged(other):
        pass
    other.optimizer.load(folder)


@contextmanager
def unchanged_groups(trained: Trained) -> Iterator[None]:
    """As `unchanged`, in little time."""
    states, groups = trained.optimizer.states, [dict(group) for group in trained.optimizer.param_groups]
    version = states.version
    yield
    assert states.version == version
    assert [dict(group) for group in trained.optimizer.param_groups] == groups


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def foreign(path: Path) -> None:
    """A sound file of somebody else, of the same length."""
    size = path.stat().st_size
    save_file({"x": torch.zeros(1)}, path)
    path.write_bytes(path.read_bytes().ljust(size, b" "))


def other_names(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b".exp_avg_sq", b".exp_avg_xy"))


def other_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"shape":[8,6]', b'"shape":[6,8]').replace(b"[16,3]", b"[3,16]"))


def swapped(path: Path) -> None:
    """The file of another save."""
    path.write_bytes(shards(path.parent)[-1].read_bytes())


@pytest.mark.parametrize("change", [cut, lengthen, foreign, other_names, other_shape, swapped, Path.unlink])
@pytest.mark.parametrize("verify", [True, False])
def test_other_files_are_refused_before_anything_changes(
    change: Callable[[Path], object], verify: bool, folder: Path, other: Trained
) -> None:
    path = shards(folder)[0]
    change(path)
    with unchanged(other), pytest.raises(CorruptRecord) as refused:
        other.optimizer.load(folder, verify=verify)
    assert str(refused.value).startswith(f"{path}: ")
    assert "expected" in str(refused.value)


def test_without_verify_damaged_data_is_found_as_it_is_loaded(folder: Path, other: Trained) -> None:
    path = shards(folder)[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match="xxh3_64 of"):
        other.optimizer.load(folder, verify=False)


def test_what_holds_no_states_says_so(tmp_path: Path, other: Trained) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with unchanged(other), pytest.raises(FileNotFoundError, match=f"{path} holds no saved optimizer states"):
            other.optimizer.load(path)
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with unchanged(other), pytest.raises(CorruptRecord, match="its first line: expected"):
        other.optimizer.load(tmp_path)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"format": "tiered_mem optimizer states", "version": 2}, "format: expected .*1.*found .*2"),
        ({"format": "tiered_mem optimizer states", "version": 1}, "values in the index"),
        ({"some": "thing"}, "values in the index"),
    ],
)
def test_an_index_of_another_version_is_refused(tree: dict[str, Any], told: str, tmp_path: Path) -> None:
    rest = json.dumps(tree)[1:].encode()
    (tmp_path / INDEX).write_bytes(b'{"xxh3_64":"' + xxhash.xxh3_64_hexdigest(rest).encode() + b'",\n' + rest)
    with pytest.raises(CorruptRecord, match=told):
        read_index(tmp_path)


# What is another optimizer's.


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **options)


def names(params: Params, letter: str) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"{letter}{index}", param) for index, param in enumerate(params)]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda params: torch.optim.SGD(params), "are those of AdamW, and this is SGD"),
        (lambda params: adamw(params[1:]), r"groups of \[5\] parameters, and AdamW has groups of \[4\]"),
        (lambda params: adamw([{"params": params[:2]}, {"params": params[2:]}]), r"\[5\].*\[2, 3\]"),
        (
            lambda params: adamw(params[::-1]),
            r"parameter 0 of float32 \[8, 6\], and that of AdamW is of float32 \[5, 7\]",
        ),
        (lambda params: adamw(names(params, "b")), "have 'a0' as number 0, and AdamW has 'b0'"),
        (
            lambda params: adamw([param.detach().bfloat16() for param in params]),
            r"float32 \[8, 6\].*bfloat16 \[8, 6\]",
        ),
    ],
    ids=["class", "fewer", "groups", "order", "names", "dtypes"],
)
def test_states_of_others_are_refused_before_anything_changes(
    make: Callable[[Any], torch.optim.Optimizer], told: str, device: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    Trained(make_tiered(adamw(names(params, "a"))), params, 0).optimizer.save(tmp_path)
    loading = make_params(device)
    optimizer = make(loading)
    loading = [param for group in optimizer.param_groups for param in group["params"]]
    for param in loading:
        param.requires_grad_()
    other = Trained(make_tiered(optimizer), loading, 3)
    with unchanged(other), pytest.raises(ValueError, match=told):
        other.optimizer.load(tmp_path)


# What cannot be saved.


class Keeping(WithRate):
    """Has something in its state."""

    def __init__(self, params: Any, thing: Any) -> None:
        super().__init__(params)
        self.thing = thing

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["kept"] = self.thing


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        ({1, 2}, "kept is a builtins.set"),
        ([object()], "kept.0 is a builtins.object"),
        (1j, "kept is a builtins.complex"),
        ({(1, 2): 3}, "kept is a builtins.dict"),
        (torch.ones(2, dtype=torch.complex128), "kept is a tensor of torch.complex128"),
        (torch.ones(2).to_sparse(), "kept is a tensor of torch.float32, torch.sparse_coo"),
    ],
    ids=["set", "object", "complex", "keys", "dtype", "sparse"],
)
def test_what_files_cannot_hold_is_refused_by_name(
    thing: Any, told: str, device: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    optimizer = Trained(make_tiered(Keeping(params, thing)), params, 1).optimizer
    with pytest.raises(TypeError, match=rf"^Keeping: \d\.{told}"):
        optimizer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    optimizer.param_groups[0]["thing"] = thing
    with pytest.raises(TypeError, match=r"^Keeping: group\.0\.thing"):
        optimizer.save(tmp_path / "saved")


@pytest.mark.parametrize("separable", [True, None], ids=["in a bucket", "at once"])
def test_tensors_of_types_of_their_own_are_refused_by_name(
    separable: bool | None, device: str, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    params = make_params(device, shapes=[(16, 8)])
    optimizer = make_tiered(Coded(params), separable=separable)
    give_gradients(params, 1, missing=False)
    optimizer.step()
    with pytest.raises(TypeError, match=r"^Coded: 0\.mean .*would have to be saved"):
        optimizer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_parts_of_parameters_are_for_another_package(
    device: str, folder: Path, tmp_path: Path, make_tiered: MakeTiered, one_process: None
) -> None:
    mesh = DeviceMesh("cpu", [0])
    local = [param.detach().cpu() for param in make_params("cpu")]
    params = [torch.nn.Parameter(DTensor.from_local(each, mesh, [Replicate()])) for each in local]
    optimizer = make_tiered(adamw(params), device="cpu")
    for call in (optimizer.save, optimizer.load):
        with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint saves and loads the parts"):
            call(folder)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_format_of_its_own_is_refused(device: str, folder: Path, make_tiered: MakeTiered) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = make_tiered(MasterWeights(params))
    for call in (optimizer.save, optimizer.load):
        with pytest.raises(ValueError, match="MasterWeights has a state_dict of its own"):
            call(folder)


def test_hooks_that_would_get_a_state_dict_are_refused(trained: Trained, folder: Path) -> None:
    optimizer, loaded = trained.optimizer, []
    after = optimizer.register_load_state_dict_post_hook(loaded.append)
    optimizer.load(folder)
    assert loaded == [optimizer]
    after.remove()
    for register, call in (
        (optimizer.register_state_dict_pre_hook, optimizer.save),
        (optimizer.register_state_dict_post_hook, optimizer.save),
        (optimizer.register_load_state_dict_pre_hook, optimizer.load),
    ):
        handle = register(lambda *_: None)
        with pytest.raises(ValueError, match=f"has a hook of {register.__name__}"):
            call(folder)
        handle.remove()


def test_there_is_no_saving_in_the_middle_of_a_step(trained: Trained, folder: Path) -> None:
    before = files(folder)
    for call in (trained.optimizer.save, trained.optimizer.load):
        with trained.optimizer.present(), pytest.raises(RuntimeError, match="in the middle of a step"):
            call(folder)
    assert files(folder) == before


def test_a_closed_manager_has_nothing_to_save(trained: Trained, folder: Path, make_tiered: MakeTiered) -> None:
    make_tiered.manager.close()
    for call in (trained.optimizer.save, trained.optimizer.load):
        with pytest.raises(Closed):
            call(folder)


# What is left when something fails.


class NoRoom(OSError):
    """The system's refusal."""


@pytest.mark.parametrize("there", [False, True], ids=["new", "over another"])
def test_a_failed_save_leaves_what_was_there(
    there: bool, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the system refuses a call, until the last one has been made."""
    where = tmp_path / "new" / "saved"
    if there:
        trained.optimizer.save(where)
    before, kept = files(tmp_path), trained.now()
    calls = ("mkdir", "chmod", "fsync", "replace", "listdir", "open")
    failed = 0
    for name in calls:
        real = getattr(os, name)
        for skip in range(100):
            left = skip

            def refuse(*args: Any, real: Any = real, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    raise NoRoom
                return real(*args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, refuse)
                with contextlib.suppress(NoRoom):
                    trained.optimizer.save(where)
                if left >= 0:
                    break
            done = read_index(where).params if (where / INDEX).exists() else None
            if done is None or files(tmp_path) == before:
                assert files(tmp_path) == before
                assert there or not (tmp_path / "new").exists()
            else:  # it had taken its place already
                trained.optimizer.load(where)
                if not there:
                    shutil.rmtree(tmp_path / "new")
                before = files(tmp_path)
            failed += 1
    assert failed > 8
    assert not differences(kept, trained.now())


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """1 MiB. Needs the right to mount."""
    where = tmp_path / "mounted"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_costs_nothing(small_file_system: Path, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device, shapes=[(128, 128)] * 5)  # states of 640 KiB, of which not two saves find room
    trained = Trained(make_tiered(adamw(params), bucket_bytes="512KiB"), params, 0)
    trained.optimizer.save(small_file_system / "saved")
    before, free = files(small_file_system), os.statvfs(small_file_system).f_bfree
    train(trained.optimizer, params, (1, 2))
    with unchanged(trained), pytest.raises(OSError, match="No space left on device") as refused:
        trained.optimizer.save(small_file_system / "saved")
    assert refused.value.errno == errno.ENOSPC
    assert refused.value.filename.startswith(str(small_file_system))
    assert files(small_file_system) == before
    assert os.statvfs(small_file_system).f_bfree == free


def test_a_file_that_is_too_large_is_an_error_of_the_system(trained: Trained, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            trained.optimizer.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "saved").exists()


def test_two_saves_into_a_directory_do_not_meet(trained: Trained, folder: Path) -> None:
    before = files(folder)
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError, match="another save into this directory is under way"):
        trained.optimizer.save(folder)
    assert files(folder) == before
    os.close(fd)
    trained.optimizer.save(folder)


def test_what_a_killed_process_left_is_removed(trained: Trained, folder: Path) -> None:
    left = folder / FolderOfSave(folder).name
    left.mkdir()
    (left / ".tmpAbC").write_text("a part")
    (folder / "states-of-mine").mkdir()
    (folder / "mine.json").write_text("")
    trained.optimizer.save(folder)
    assert not left.exists()
    assert len(list(folder.glob("states-*"))) == 2
    assert (folder / "states-of-mine").is_dir()
    assert (folder / "mine.json").exists()


def test_an_interrupt_ends_a_save(trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many states it takes minutes. A handler finds nothing half done, and may not begin anything else."""
    before, told = files(folder), []

    def handler(*_: object) -> None:
        for call in (trained.optimizer.state_dict, trained.optimizer.step, lambda: trained.optimizer.save(folder)):
            with pytest.raises(Reentered) as refused:
                call()
            told.append(str(refused.value))
        raise KeyboardInterrupt

    def save_and_interrupt(*args: Any) -> None:
        save_file(*args)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(saved_states, "save_file", save_and_interrupt)
    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        train(trained.optimizer, trained.params, (2,))  # the manager sees the handler
        with unchanged(trained), pytest.raises(KeyboardInterrupt):
            trained.optimizer.save(folder)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert len(told) == 3
    assert files(folder) == before


@pytest.mark.slow(why="a process imports torch, and is killed again and again")
def test_a_process_that_is_killed_leaves_the_save_from_before() -> None:
    done = run("-m", "tests.optimizer.kill_saves", cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] > 10
    assert found["after"] > 0
