"""The fenced blocks of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT)
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "emulator").rglob("*.md")])
    if not {"node_modules", ".venv", "build"} & set(path.relative_to(ROOT).parts)
]
FENCE = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """line: that of its fence. text: without the indent of its fence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def result(self) -> Block:
        """What a diff comes to: a block of the language of its file. Other blocks are what they come to."""
        if self.language != "diff":
            return self
        before, after, *lines = self.text.splitlines()
        name = Path(after.removeprefix("+++ "))
        if before != f"--- {name}" or name.suffix not in RESULTS:
            raise ValueError(f"{self} does not begin with '--- FILE' and '+++ FILE', of {' or '.join(RESULTS)}")
        if strange := [line for line in lines if line[:1] not in ("+", "-", " ", "")]:
            raise ValueError(f"{self} has a line that is neither +, - nor indented: {strange[0]}")
        kept = [line[1:] for line in lines if not line.startswith("-")]
        # Two lines of padding, for the lines of its head.
        return Block(self.page, self.line, RESULTS[name.suffix], "\n".join(["", "", *kept]) + "\n")


RESULTS = {".py": "python", ".sh": "sh", ".yaml": "yaml"}


def blocks_of(page: Path) -> Iterator[Block]:
    """page: from the root of the repository."""
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, body = (number, fence[1], fence[2]), []
        elif opened is not None and fence and not fence[2]:
            at, _, language = opened
            yield Block(page, at, language, "\n".join(body) + "\n")
            opened = None
        elif opened is not None:
            body.append(line.removeprefix(opened[1]))
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]} is never closed")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
