"""Lets the child processes of one that has the emulated device have it too, each with memory of its own."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

CHILD = Path(__file__).parent / "child"
# The process whose options are in the environment. Without this variable a child is left alone.
STARTED_BY = "ASCEND_EMULATOR_STARTED_BY"


def hand_on(environment: MutableMapping[str, str]) -> None:
    """Makes Python run child/sitecustomize.py at the start of every process that is given this environment."""
    environment.setdefault(STARTED_BY, str(os.getpid()))
    path = environment.get("PYTHONPATH")
    folders = path.split(os.pathsep) if path else []
    others = [folder for folder in folders if folder != str(CHILD)]
    environment["PYTHONPATH"] = os.pathsep.join([str(CHILD), *others])


def is_child(environment: Mapping[str, str]) -> bool:
    """Whether this process has its options from another one."""
    return environment.get(STARTED_BY, str(os.getpid())) != str(os.getpid())
