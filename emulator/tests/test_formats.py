"""Private formats: labels, under which the data are as before."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from emulator.tests.compare import assert_equal, random_inputs, with_gradients

npu = torch.ops.npu
ND, NC1HWC0, FRACTAL_NZ = 2, 3, 29


@pytest.fixture
def private_formats() -> Iterator[None]:
    """They are allowed, which is not the default."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    (x,) = random_inputs([(15, 17)], dtype)
    return x


@pytest.mark.usefixtures("private_formats")
def test_a_cast_says_its_format_and_keeps_the_data() -> None:
    x = matrix()
    ours = npu.npu_format_cast(x.npu(), FRACTAL_NZ)
    assert npu.get_npu_format(ours) == npu.get_npu_format(ours.t()) == FRACTAL_NZ
    assert npu.get_npu_format(ours + 0) == npu.get_npu_format(x.npu()) == ND
    assert_equal([ours, ours.t(), ours @ ours.t()], [x, x.t(), x @ x.t()], 1e-5)
    back = npu.npu_format_cast(ours, ND)
    assert npu.get_npu_format(back) == ND
    assert_equal(back, x)


@pytest.mark.usefixtures("private_formats")
def test_the_same_format_is_the_same_tensor() -> None:
    ours = npu.npu_format_cast(matrix().npu(), FRACTAL_NZ)
    assert npu.npu_format_cast(ours, FRACTAL_NZ).data_ptr() == ours.data_ptr()
    other = npu.npu_format_cast(matrix().npu(), ours)
    assert npu.get_npu_format(other) == FRACTAL_NZ
    assert npu.get_npu_format(npu.npu_format_cast(other, torch.ones(2, 2, device="npu"))) == ND


@pytest.mark.usefixtures("private_formats")
def test_a_cast_in_place_takes_another_storage() -> None:
    x = matrix()
    ours = x.npu()
    npu.npu_format_cast_(ours, FRACTAL_NZ)
    assert npu.get_npu_format(ours) == FRACTAL_NZ
    npu.npu_format_cast_(ours, ND)
    assert npu.get_npu_format(ours) == ND
    assert_equal(ours, x)


@pytest.mark.usefixtures("private_formats")
@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float16, 16 * 32 * 2), (torch.int8, 16 * 32)], ids=str)
def test_the_storage_has_what_the_format_adds(dtype: torch.dtype, nbytes: int) -> None:
    ours = npu.npu_format_cast(matrix(dtype).npu(), FRACTAL_NZ)
    assert ours.untyped_storage().nbytes() == nbytes
    images = npu.npu_format_cast(torch.ones(2, 3, 4, 5, dtype=dtype, device="npu"), NC1HWC0)
    assert images.untyped_storage().nbytes() == 2 * 16 * 4 * 5 * images.element_size()


@pytest.mark.usefixtures("private_formats")
def test_what_has_no_rows_and_columns_stays_plain() -> None:
    assert npu.get_npu_format(npu.npu_format_cast(torch.ones(12, device="npu"), FRACTAL_NZ)) == ND


@pytest.mark.usefixtures("private_formats")
def test_a_cast_has_gradients() -> None:
    result = with_gradients(lambda x: npu._npu_format_cast(x, FRACTAL_NZ) * 2, [matrix().npu()])
    assert_equal(result, with_gradients(lambda x: x * 2, [matrix()]))


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
def test_where_private_formats_are_not_allowed_the_format_stays_plain() -> None:
    ours = npu.npu_format_cast(matrix().npu(), FRACTAL_NZ)
    assert npu.get_npu_format(ours) == ND
    assert_equal(ours, matrix())
