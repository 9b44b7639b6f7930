"""README's first program, as it stands there, on a laptop and on the emulated NPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run

README = Path(__file__).parents[2] / "README.md"

pytestmark = [
    pytest.mark.slow(why="it trains for ten seconds on an idle machine"),
    pytest.mark.once(why="its processes have a schedule of their own"),
]


# After the program: the same training without a manager has the same weights.
PLAIN = """
for batch in batches:
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert manager.stats()["released.bytes.total"] > 0
for mine, other in zip(tiered.parameters(), model.parameters(), strict=True):
    assert torch.equal(mine, other)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    text = README.read_text().split("```python\n")[1].split("```")[0]
    head = text.partition("\nwith ")[0]
    seed = "import torch\ntorch.manual_seed(0)\n"
    file = tmp_path / "first.py"
    file.write_text(f"{seed}{text}\ntiered = model\n{seed}{head}\n{PLAIN}")
    return file


def test_it_keeps_its_budget(program: Path, tmp_path: Path) -> None:
    done = run(*EMULATOR, str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].strip())
    assert report["budget"] == "160.0 MiB"
    # Where the machine is fast, the last step is one of those that try, and has no plan.
    peaks = [float(each.split()[-3]) for each in report["peak"].split(",")[:2]]
    assert 0 < max(peaks) <= 160


def test_a_cpu_trains_all_the_same(program: Path, tmp_path: Path) -> None:
    done = run(str(program), cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert "no accelerator on this machine" in done.stderr
    assert "without the device_budget" in done.stderr
