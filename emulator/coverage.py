"""Makes the table in docs/operators.md: what operators common training calls, and where the emulated NPU runs them.

    python -m ascend_emulator emulator/coverage.py [--write]

It trains what emulator/tests/training_set.py and library_models.py name. Without --write the table is printed.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emulator.tests import library_models
from emulator.tests.training_set import TRAINING_SET

PAGE = Path(__file__).parent / "docs" / "operators.md"
BEGIN, END = "<!-- coverage.py -->\n", "<!-- end of coverage.py -->\n"


# What is trained on a device, by the table's rows.
ROWS: dict[str, Callable[[str], Any]] = TRAINING_SET | {
    f"{name} of {kind.library}": partial(library_models.train, name, dropout=0.1)
    for name, kind in library_models.LIBRARY_MODELS.items()
}

# Of these rows a dry run does not tell all to the byte and the nanosecond, but only the peak of memory, or all that
# happens to memory. Operators on the CPU have bytes to bring there, which a dry run has not. Mixed precision has
# such operators too, and autocast frees its casts in another order in each run. Mixtral's experts have equal parts.
DRY: dict[str, str] = {
    "Mixed precision": "peak",
    "Optimizers": "peak",
    "ViT, with dropout and checkpointing": "memory",
    "Mixtral of transformers": "memory",
}


def name_of(operator: OpOverload) -> str:
    """Without the overload; add_ counts as add."""
    return str(operator.overloadpacket.__name__).rstrip("_")


class Calls(TorchDispatchMode):
    """Notes the operators that meet an NPU tensor, other than views, and which of them torch_npu does not know.

    Those run on the CPU by a fallback of torch_npu's own, of which the emulator sees nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        on_npu = any(isinstance(leaf, torch.Tensor) and leaf.device.type == "npu" for leaf in leaves)
        if on_npu and not operator.is_view:
            self.names.add(name_of(operator))
            if not has_kernel(operator):
                self.unknown.add(name_of(operator))
        return result


def has_kernel(operator: OpOverload) -> bool:
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)


class Fallbacks(logging.Handler):
    """Notes the operators that the emulator's fallback says it runs on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        operator = record.args[0]
        assert isinstance(operator, OpOverload)
        self.names.add(name_of(operator))


def operators_of(run: Callable[[str], Any]) -> tuple[set[str], set[str]]:
    """Those that run natively, and those that run on the CPU."""
    logger = logging.getLogger("ascend_emulator.fallback")
    level, fallbacks, calls = logger.level, Fallbacks(), Calls()
    logger.addHandler(fallbacks)
    logger.setLevel(logging.DEBUG)
    try:
        with calls:
            run("npu")
    finally:
        logger.removeHandler(fallbacks)
        logger.setLevel(level)
    on_cpu = fallbacks.names | calls.unknown
    return calls.names - on_cpu, on_cpu


def table() -> str:
    """In Markdown. A row names only what no row above it does."""
    lines = [
        "| what trains | natively, asynchronously | on the CPU, the caller waits | dry, exactly |",
        "|---|---|---|---|",
    ]
    named: set[str] = set()
    for title, run in ROWS.items():
        native, on_cpu = operators_of(run)
        cells = (", ".join(sorted(names - named)) or "none" for names in (native, on_cpu))
        lines.append(f"| {title} | {' | '.join(cells)} | {DRY.get(title, 'all')} |")
        named |= native | on_cpu
    return "\n".join(lines) + "\n"


def table_in(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="The operators that common training calls, and where they run.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/operators.md")
    if parser.parse_args().write:
        page = PAGE.read_text()
        PAGE.write_text(page.replace(BEGIN + table_in(page) + END, BEGIN + table() + END))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
