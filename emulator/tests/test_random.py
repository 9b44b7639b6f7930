"""Random numbers and dropout of the emulated NPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import assert_equal, on, random_inputs


def test_random_numbers_follow_the_seed() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        draws = [
            torch.randn(1000, device="npu"),
            torch.randn(1000, device="npu"),
            torch.rand(1000, device="npu"),
            torch.randint(0, 100, (1000,), device="npu").float(),
            torch.empty(1000, device="npu").bernoulli_(0.25),
            torch.full((1000,), 0.25, device="npu").bernoulli(),
            F.dropout(torch.ones(1000, device="npu"), 0.25),
            torch.randperm(1000, device="npu").float(),
        ]
        return [each.cpu() for each in draws]

    first, second = draw(), draw()
    assert_equal(first, second)
    normal, again, uniform, integers, coins, more_coins, dropped, order = first
    assert not torch.equal(normal, again)
    for values, mean, deviation in (
        (normal, 0, 1),
        (again, 0, 1),
        (uniform, 0.5, 0.289),
        (integers, 49.5, 28.9),
        (coins, 0.25, 0.433),
        (more_coins, 0.25, 0.433),
        (dropped, 1, 0.577),
    ):
        assert abs(values.mean() - mean) < 0.15 * deviation
        assert abs(values.std() - deviation) < 0.1 * deviation
    assert order.sort().values.equal(torch.arange(1000.0))


def test_random_numbers_of_the_npu_leave_those_of_the_cpu_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.randn(3, device="npu")
    torch.randperm(3, device="npu")
    assert_equal(torch.rand(3), expected)


def test_dropout_drops_the_same_in_backward() -> None:
    x = torch.ones(64, 64, device="npu", requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert_equal(x.grad, y.detach().cpu())


def test_attention_dropout_is_reproducible_and_has_gradients() -> None:
    query, key, value = on("npu", random_inputs([(1, 2, 32, 8)] * 3, torch.float32))

    def attend(value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    value.requires_grad_()
    assert_equal(attend(value).detach(), attend(value).detach().cpu())
    attend(value).sum().backward()
    step = torch.zeros_like(value)
    step[0, 0, 5, 3] = 1
    slope = attend(value.detach() + step).sum() - attend(value.detach()).sum()  # linear in value
    torch.testing.assert_close(slope.cpu(), value.grad[0, 0, 5, 3].cpu(), rtol=1e-3, atol=1e-3)
