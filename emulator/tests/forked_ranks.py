"""Forks the ranks of a job, which torch.distributed.run starts as processes of their own: RANKS MODULE ARGS...

A rank of a small job takes as long to import torch as for all else. Here that is done once, before there are ranks.
One that ends by os._exit is waited for in vain.
"""

from __future__ import annotations

import gc
import runpy
import sys

import torch.distributed.pipelining  # noqa: F401
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_module(name: str, arguments: list[str]) -> None:
    """As a rank, whose number is in its environment now."""
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    ranks, module, *arguments = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    gc.freeze()  # else each rank's collections write to the pages that all share
    elastic_launch(config, run_module)(module, arguments)


if __name__ == "__main__":
    main()
