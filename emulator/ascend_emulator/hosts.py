"""The modelled machine's host memory."""

import os

from ascend_emulator.options import Options
from ascend_emulator.runtime import is_running, runtime

# Of a server of a dry run, where nobody says how much it has.
_USUAL = 512 << 30


def offered_host() -> int | None:
    """What pyproject.toml offers as an entry point: the bytes that --host says. None where memory is real."""
    if not is_running() or not runtime().ascend_emulator_is_dry():
        return None
    return Options.inherited(os.environ).host_bytes or _USUAL
