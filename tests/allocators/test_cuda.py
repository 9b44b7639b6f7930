"""CudaPinnedMemory and the two registrars of CUDA, on a runtime that the tests bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulator.tests.launch import run
from tests.allocators.cudart import ALREADY_REGISTERED, NOT_REGISTERED, Cudart
from tests.allocators.mappings import is_mapped
from tests.contracts import check_host_memory, ends_hold, write_ends
from tiered_mem.allocators import CudaPinnedMemory
from tiered_mem.allocators.base import OutOfHostMemory
from tiered_mem.allocators.cuda import CudaError, CudaRegistrar
from tiered_mem.allocators.runtime import RegisteredMemory, Registrar
from tiered_mem.tiers.pinning import CudartRegistrar

CHUNK = 1 << 20
ILLEGAL_ADDRESS = 700


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Cudart:
    return Cudart(tmp_path_factory.mktemp("cudart"))


@pytest.fixture
def cudart(built: Cudart) -> Iterator[Cudart]:
    yield built
    built.shift_by(0)
    assert (built.allocated, built.registered, built.last_error) == (0, 0, 0)


def by_ctypes(cudart: Cudart) -> Registrar:
    return CudaRegistrar(cudart.path)


def by_torch(cudart: Cudart) -> Registrar:
    return CudartRegistrar(cudart, forget=lambda: assert_failed(cudart.cudaGetLastError()))


def assert_failed(code: int) -> None:
    assert code != 0


BOTH = pytest.mark.parametrize("make_registrar", [by_ctypes, by_torch])
MakeRegistrar = Callable[[Cudart], Registrar]


def test_contract(cudart: Cudart) -> None:
    check_host_memory(lambda: CudaPinnedMemory(cudart.path))


@BOTH
def test_contract_of_registered_memory(cudart: Cudart, make_registrar: MakeRegistrar) -> None:
    check_host_memory(lambda: RegisteredMemory(make_registrar(cudart), chunk_bytes=CHUNK))


def test_memory_is_pinned_while_it_is_allocated(cudart: Cudart) -> None:
    memory = CudaPinnedMemory(cudart.path)
    region = memory.allocate(3 << 20)
    assert cudart.allocated == 3 << 20
    memory.deallocate(region)
    memory.close()


def test_memory_off_a_page_is_asked_for_again_with_room_to_spare(cudart: Cudart) -> None:
    cudart.shift_by(512)
    memory = CudaPinnedMemory(cudart.path)
    region = memory.allocate(8192)
    assert (region.ptr % 4096, region.nbytes, cudart.allocated) == (0, 8192, 8192 + 4096)
    write_ends(region, 9)
    assert ends_hold(region, 9)
    memory.deallocate(region)


def test_no_memory_to_pin_is_out_of_memory_and_leaves_no_error_behind(cudart: Cudart) -> None:
    memory = CudaPinnedMemory(cudart.path)
    held = memory.allocate(1 << 20)
    with pytest.raises(OutOfHostMemory, match=r"CUDA error 2: out of memory \(needed .* used 1\.0 MiB,"):
        memory.allocate(1 << 60)
    assert cudart.last_error == 0
    memory.deallocate(held)


def test_another_failure_keeps_its_name_and_leaves_no_error_behind(cudart: Cudart) -> None:
    memory = CudaPinnedMemory(cudart.path)
    cudart.fail_next(ILLEGAL_ADDRESS)
    with pytest.raises(
        CudaError, match=r"cudaHostAlloc failed with CUDA error 700 for 4\.0 KiB .*illegal"
    ) as caught:
        memory.allocate(4096)
    assert (caught.value.function, caught.value.code, caught.value.nbytes) == ("cudaHostAlloc", 700, 4096)
    assert cudart.last_error == 0


def test_a_failing_free_can_be_repeated(cudart: Cudart) -> None:
    memory = CudaPinnedMemory(cudart.path)
    region = memory.allocate(4096)
    cudart.fail_next(ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="cudaFreeHost failed with CUDA error 700"):
        memory.deallocate(region)
    assert (cudart.allocated, cudart.last_error) == (4096, 0)
    memory.deallocate(region)


@BOTH
def test_all_of_a_region_is_registered_while_it_is_allocated(cudart: Cudart, make_registrar: MakeRegistrar) -> None:
    memory = RegisteredMemory(make_registrar(cudart), chunk_bytes=CHUNK)
    region = memory.allocate(3 * CHUNK + 1)
    assert cudart.registered == memory.footprint(region.nbytes)
    memory.deallocate(region)


@BOTH
def test_a_refused_registration_is_out_of_memory_and_leaves_no_error_behind(
    cudart: Cudart, make_registrar: MakeRegistrar
) -> None:
    memory = RegisteredMemory(make_registrar(cudart))
    cudart.fail_next(2)
    with pytest.raises(
        OutOfHostMemory, match=r"cudaHostRegister failed with CUDA error 2: out of memory .*used 0 B"
    ):
        memory.allocate(CHUNK)
    assert cudart.last_error == 0
    memory.close()


@BOTH
def test_other_failures_of_a_registrar_have_their_names(cudart: Cudart, make_registrar: MakeRegistrar) -> None:
    memory = RegisteredMemory(make_registrar(cudart))
    region = memory.allocate(CHUNK)
    registrar = make_registrar(cudart)
    with pytest.raises(
        CudaError, match=f"cudaHostRegister failed with CUDA error {ALREADY_REGISTERED} for 1.0 MiB"
    ):
        registrar.register(region.ptr, CHUNK)
    assert cudart.last_error == 0
    with pytest.raises(CudaError, match=f"cudaHostUnregister failed with CUDA error {NOT_REGISTERED}: something"):
        registrar.unregister(region.ptr + 4096)
    assert cudart.last_error == 0
    cudart.fail_next(ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="CUDA error 700"):
        memory.deallocate(region)
    assert is_mapped(region.ptr)
    memory.deallocate(region)


def test_the_library_that_is_loaded_already_is_taken(tmp_path: Path) -> None:
    for name in ("libcudart.so.13", "libcudart.so.12"):
        Cudart(tmp_path, name)
    code = """
import ctypes, sys
from tiered_mem import allocators
loaded = ctypes.CDLL(sys.argv[1] + "/libcudart.so.12")
memory = allocators.CudaPinnedMemory()
memory.allocate(4096)
print(loaded.bytes_allocated(), len([line for line in open("/proc/self/maps") if "libcudart.so.13" in line]))
"""
    done = run("-c", code, str(tmp_path), cwd=Path(__file__).parents[2], LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == "4096 0\n", done.stderr


def test_without_one_the_newest_that_is_found_is_loaded(tmp_path: Path) -> None:
    for name in ("libcudart.so.13", "libcudart.so.12"):
        Cudart(tmp_path, name)
    code = """
from tiered_mem import allocators
allocators.cuda.CudaRegistrar()
print({line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line})
"""
    done = run("-c", code, cwd=Path(__file__).parents[2], LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == f"{{'{tmp_path}/libcudart.so.13'}}\n", done.stderr


@pytest.mark.parametrize("make", [CudaPinnedMemory, CudaRegistrar])
def test_a_missing_library_is_told_at_construction(make: Callable[[str], object]) -> None:
    with pytest.raises(OSError, match=r"cannot load the CUDA runtime \(libnothere\.so\): .*PageableMemory"):
        make("libnothere.so")


@pytest.mark.parametrize("make", [CudaPinnedMemory, CudaRegistrar])
def test_a_library_without_the_functions_is_told_at_construction(make: Callable[[str], object]) -> None:
    with pytest.raises(OSError, match=r"'libc\.so\.6' has no function cudaGetErrorString"):
        make("libc.so.6")
