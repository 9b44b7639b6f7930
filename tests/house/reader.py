"""A reader who tries the programs in the documents: reader.py RESULTS PLACE PAGE[:LINE]...

Each page has a process and an empty folder of its own, and each program `names_of_a_reader`, made anew. What went
wrong is written to RESULTS, a file for each page: an object of JSON with the tracebacks by the lines of the blocks.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.house.blocks import ROOT, Block, blocks_of

# Programs go to the first place that fits.
RANKS = {"docs/ranks.md", "docs/frameworks/accelerate.md", "emulator/docs/hccl.md"}
EMULATOR = re.compile(r"npu|Acl|ascend_emulator|current_accelerator|transformers")
# What is not installed where the tests run; programs with it are compiled, and what they import of tiered_mem is
# looked up. Their integrations are run by tests/integrations.
ABSENT = {
    "axolotl": "make test-integrations installs it",
    "lightning": "make test-integrations installs it",
    "llamafactory": "nothing here installs it",
    "mindspeed": "it is on no package index",
    "mindspeed_llm": "it is on no package index",
    "peft": "make test-integrations installs it",
    "swift": "make test-integrations installs it",
    "tensorboard": "nothing here installs it",
    "torchtitan": "make test-integrations installs it",
    "trl": "make test-integrations installs it",
    "verl": "make test-integrations installs it",
    "xtuner": "it is on no package index",
}
# A reader's machine is larger than this one, and has a drive.
SMALLER = [
    (r'device_budget="\d+GiB"', 'device_budget="4GiB"'),
    (r'((?:host|spill)_bytes=)"\d+[GT]iB"', r'\1"96MiB"'),
    (r"/mnt/nvme/\w+", "drive"),
]
LAYERS = 24


def main(results: Path, place: str, pages: list[str]) -> None:
    results = results.absolute()
    if len(pages) == 1:
        run_page(results, place, pages[0])
        return
    from tests.forked import in_forks

    import_what_pages_need()
    for page, code in in_forks(((page, partial(run_page, results, place, page)) for page in pages), jobs=2):
        if code:
            raise SystemExit(f"the process of {page} ended with {code}")


def import_what_pages_need() -> None:
    """Once, before the forks. Each first optimizer would else import torch's compiler."""
    import torch._dynamo  # noqa: F401

    from tiered_mem import TieringManager, async_save_on_cpu  # noqa: F401


def programs_of(page: Path) -> list[Block]:
    return [block.result for block in blocks_of(page) if block.result.language == "python"]


def place_of(program: Block) -> str:
    """Where it runs: "cpu", "emulator" or "ranks". "nowhere" is for a framework that is not there."""
    if absent_in(program):
        return "nowhere"
    if str(program.page) in RANKS:
        return "ranks"
    return "emulator" if EMULATOR.search(program.text) else "cpu"


def absent_in(program: Block) -> list[str]:
    """Which frameworks it imports that are not there, an integration's included."""
    words = {word for module in imported(program.text) for word in module.split(".")}
    return sorted(words & ABSENT.keys())


def imported(text: str) -> Iterator[str]:
    """The modules that a program imports, and those that it imports from."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # which the reader tells of, with the page and the line
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def run_page(results: Path, place: str, page: str) -> int:
    """page: with or without the line of a program, which is then the only one."""
    name, _, line = page.partition(":")
    rank = os.environ.get("RANK", "0")
    errors = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for program in programs_of(Path(name)):
            if place_of(program) == place and line in ("", str(program.line)):
                os.chdir(folder)
                try:
                    run(program)
                except BaseException:
                    errors[program.line] = traceback.format_exc()
        os.chdir(ROOT)
    (results / f"{page.replace('/', '-')}.{rank}.json").write_text(json.dumps(errors))
    return 0


def run(program: Block) -> None:
    """Raises what the program raises, with the page's own lines in the traceback."""
    text = program.text
    for real, smaller in SMALLER:
        text = re.sub(real, smaller, text)
    if "ascend_emulator.start(" in text:  # which is for a process without torch
        subprocess.run([sys.executable, "-c", text], check=True)
        return
    code = compile("\n" * program.line + text, str(ROOT / program.page), "exec")
    with names_of_a_reader(program.page) as names, warnings.catch_warnings():
        warnings.filterwarnings("error", module="example")
        exec(code, names)
        for test in [each for name, each in names.items() if name.startswith("test_")]:
            test()


@contextlib.contextmanager
def names_of_a_reader(page: Path) -> Iterator[dict[str, Any]]:
    """What examples take for granted: a user's model, data, optimizer, and a manager that is open."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import tiered_mem
    from tests.models import Stack
    from tiered_mem.policies import LayerOrderPolicy

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, rank) if accelerator else torch.device("cpu")
    if accelerator:
        torch.accelerator.set_device_index(rank)
    width = 16
    model, learner, generator = (Stack(LAYERS, width).to(device) for _ in range(3))
    batches = [torch.randn(32, width, device=device) for _ in range(2)]

    class MyOptimizer(torch.optim.SGD):
        pass

    Path("drive").mkdir(exist_ok=True)
    with tiered_mem.TieringManager(policy=LayerOrderPolicy(), host_bytes="96MiB", trace=True) as manager:
        yield {
            "__name__": "example",
            "torch": torch,
            "nn": nn,
            "TieringManager": tiered_mem.TieringManager,
            "LayerOrderPolicy": LayerOrderPolicy,
            # a training
            "device": device,
            "model": model,
            "layers": model.layers,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "batches": batches,
            "batch": batches[0],
            "x": batches[0],
            "loader": DataLoader(torch.randn(64, width), batch_size=32),
            "step": lambda: model(batches[0]).backward(),
            "manager": manager,
            "policy": LayerOrderPolicy(),
            "MyOptimizer": MyOptimizer,
            # two models that take turns
            "learner": learner,
            "generator": generator,
            "prompts": batches,
            "generate": lambda model, batch: model(batch).item(),
            "train": lambda model, optimizer, texts: optimizer.step(),
            **names_of_page(page, model),
        }
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def names_of_page(page: Path, model: Any) -> dict[str, Any]:
    """What the examples of one page have beside that."""
    match page.stem:
        case "lower_tier":
            from tests.tiers.remote_tier import RemoteTier

            return {"MyTier": lambda *arguments: RemoteTier(64 << 20)}
        case "mindspeed":
            return {"h2d_stream": None, "d2h_stream": None, "n": LAYERS, "is_large": lambda tensor: True}
        case "spill_format":
            from tests.spill.records import sample

            made = sample(("block.17", "bfloat16", 10000), ("block.18", "complex128", 4096))
            made.write(Path()).rename("0.safetensors")
        case "transformers":
            from transformers import Trainer, TrainingArguments

            from tests.integrations import tiny_llama

            model = tiny_llama.model()
            words = {"input_ids": list(range(8)), "labels": list(range(8))}
            args, data = TrainingArguments("out", max_steps=1, report_to=[]), [words] * 8
            return {"model": model, "args": args, "data": data, "trainer": Trainer(model, args, train_dataset=data)}
    return {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
