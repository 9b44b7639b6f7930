"""The names that users type: all of them, so that none comes or goes by accident."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

import tiered_mem
from tests.house.test_layers import PRODUCT, ROOT, tree_of
from tiered_mem.allocators import base
from tiered_mem.policies.planning import profile

pytestmark = pytest.mark.once(why="it needs no device")

PUBLIC = {
    "tiered_mem": """
        BudgetTooSmall ChangedTensor Closed CorruptRecord DeviceFailed DeviceUnavailable InterruptedStep
        NotRepeatable OffloadContext OffloadRefused Offloaded OutOfHostMemory OverlapRefused PinningFailed
        PolicyError Reentered SpillDirRefused TierFull TieredMemError TieringManager async_save_on_cpu configure
        default_manager optim
    """,
    "tiered_mem.allocators": """
        AclPinnedMemory CudaPinnedMemory HostMemory HostPool LockedMemory PageableMemory PoolStats Region SlabPool
    """,
    "tiered_mem.cpu_offload": """
        CpuOffloadContext DefaultOffloadSynchronizer ManualOffloadSynchronizer OffloadSynchronizer
        OffloadableLayerState SynchronizationDictSynchronizer get_cpu_offload_context is_cpu_offload_enabled
        mark_activation_offload mark_not_offload start_offload
    """,
    "tiered_mem.policies": """
        Action Dropped Each Event Fetch ForwardBegin ForwardEnd HostPressure LRUPolicy LayerBegin LayerEnd
        LayerOrderPolicy Link ManualPolicy Offload Place Placed Places PlannedPolicy Policy Recompute Release Reload
        Retain Saved Spill SynchronizationDictPolicy
    """,
}
# Packages of the product's own, which say for mypy what they hand on.
INSIDE = {"tiered_mem.policies.planning"}
# Transformer Engine's names.
THEIRS = {"tiered_mem.cpu_offload"}


def modules() -> Iterator[ModuleType]:
    """All that say what is public in them."""
    for path in PRODUCT:
        if "__all__" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if parts[0] == "tiered_mem" else ("tiered_mem", *parts))
            yield importlib.import_module(name.removesuffix(".__init__"))


def test_the_public_names_are_these() -> None:
    found = {module.__name__: module.__all__ for module in modules() if module.__name__ not in INSIDE}
    assert found == {name: names.split() for name, names in PUBLIC.items()}


def test_they_are_few() -> None:
    assert sum(len(names.split()) for module, names in PUBLIC.items() if module not in THEIRS) <= 60


@pytest.mark.parametrize("module", PUBLIC)
def test_each_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert all(getattr(found, name) is not None for name in PUBLIC[module].split())


def test_the_errors_are_those_that_are_raised() -> None:
    assert tiered_mem.BudgetTooSmall is profile.BudgetTooSmall
    assert tiered_mem.OutOfHostMemory is base.OutOfHostMemory


def test_a_package_hands_on_its_public_names_only() -> None:
    """A name that is imported and not listed would be one that users find, and that goes."""
    for path in (ROOT / "policies" / "__init__.py", ROOT / "allocators" / "__init__.py"):
        module = importlib.import_module(f"tiered_mem.{path.parent.name}")
        tree = tree_of(path)
        imported = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", [])}
        assert imported == set(module.__all__)
