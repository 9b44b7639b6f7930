"""Mixtures of experts in a dry run: as if each expert had as many tokens as the others, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = [
    pytest.mark.slow(why="each starts processes that train"),
    pytest.mark.once(why="its processes have a schedule of their own"),
]

# The scores are such that in a real run, too, each expert has as many tokens as the others.
SCRIPT = """
    import json
    import ascend_emulator
    import torch

    EXPERTS, TOKENS, CHOICES, WIDTH = 3, 7, 2, 32
    tokens = torch.arange(TOKENS)
    scores = torch.zeros(TOKENS, EXPERTS)
    scores[tokens, tokens % EXPERTS] = 2.0
    scores[tokens, (tokens + 1) % EXPERTS] = 1.0
    scores = scores.to("npu")
    weight = torch.randn(EXPERTS, WIDTH, WIDTH, device="npu", requires_grad=True)
    x = torch.randn(TOKENS, WIDTH, device="npu", requires_grad=True)

    def one_hot(chosen):  # as Mixtral of transformers has it
        mask = torch.nn.functional.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = expert[0]
            if expert == EXPERTS:
                continue
            _, token = torch.where(mask[expert])
            out.index_add_(0, token, x[token] @ weight[expert])
        return out

    def comparisons(chosen):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, x[token] @ weight[expert])
        return out

    def grouped(chosen):
        order = torch.sort(chosen.reshape(-1)).indices
        counts = torch.histc(chosen.reshape(-1).int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        token = order // CHOICES
        return torch.zeros_like(x).index_add_(0, token, torch._grouped_mm(x[token], weight, offs=ends))

    def counted(chosen):
        return torch.bincount(chosen.reshape(-1), minlength=EXPERTS)

    found = {}
    for work in (one_hot, comparisons, grouped, counted):
        try:
            with ascend_emulator.record_timeline() as spans:
                out = work(scores.topk(CHOICES, -1).indices)
                if work is not counted:
                    out.sum().backward()
                torch.npu.synchronize()
        except NotImplementedError as error:
            found[work.__name__] = str(error)
            continue
        products = [span for span in spans if span.name in ("aclnnMm", "aclnnMatmul", "aclnnIndexAdd")]
        times = [round((span.end - span.start) * 1e9) for span in products]
        rows = [[span.name, span.nbytes, time] for span, time in zip(products, times, strict=True)]
        found[work.__name__] = [list(out.shape), sorted(rows)]
    print(json.dumps(found))
"""


def train(folder: Path, *options: str) -> dict[str, Any]:
    done = run(*EMULATOR, "--clock", "910b3", *options, write_script(folder, SCRIPT), cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("real"))


def test_uniform_routing_has_the_products_of_a_real_one(real: dict[str, Any], tmp_path: Path) -> None:
    dry = train(tmp_path, "--dry", "--dry-routing", "uniform")
    assert dry == real
    for name in ("one_hot", "comparisons", "grouped"):
        assert len(real[name][1]) >= 3 * 3  # forward, and both gradients


def test_without_it_each_is_refused_by_name(tmp_path: Path) -> None:
    dry = train(tmp_path, "--dry")
    asked = {
        "one_hot": "nonzero.default",
        "comparisons": "nonzero.default",
        "grouped": "_grouped_mm.default",
        "counted": "bincount.default",
    }
    for name, operator in asked.items():
        assert dry[name].startswith(f"aten.{operator}: ")
        assert "--dry-routing uniform" in dry[name]
        assert "\n" not in dry[name]
