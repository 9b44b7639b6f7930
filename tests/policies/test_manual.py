from __future__ import annotations

from tests.policies.contract import check_policy
from tests.policies.events import backward, forward, tell
from tiered_mem.policies import ManualPolicy


def test_it_advises_nothing() -> None:
    policy = ManualPolicy()
    policy.check(0)
    policy.check(100)
    assert tell(policy, forward(0, 4) + backward(0, 4)) == []
    assert vars(policy) == {}


def test_it_keeps_the_contract() -> None:
    check_policy(ManualPolicy)
