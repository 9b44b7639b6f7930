"""python -m ascend_emulator -m tests.moves: writes the records anew, after a change that means to change them."""

import tempfile
from pathlib import Path

from tests.moves.record import POLICIES, file_of, moves_of

for name in POLICIES:
    with tempfile.TemporaryDirectory() as folder:
        lines = moves_of(name, "npu", Path(folder))
    file_of(name).write_text("\n".join(lines) + "\n")
    print(f"{file_of(name)}: {len(lines)} lines")
