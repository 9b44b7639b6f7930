"""How children find this package: wherever it was started from."""

import os
from pathlib import Path

_EMULATOR = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    """This process's, with the emulator's folder in front of PYTHONPATH."""
    paths = [str(_EMULATOR), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
