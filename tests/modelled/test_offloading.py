"""A training that offloads has one result in all schedules of the emulator, and one timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import machine


@pytest.mark.slow(why="three processes train a model")
def test_a_gpt_learns_the_same_in_all(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        from emulator.tests.gpt import CONTEXT, GPT, VOCABULARY
        from tiered_mem import TieringManager
        torch.manual_seed(0)
        model = GPT(modern=False).to("npu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(VOCABULARY, (4, CONTEXT)).to("npu")
        with TieringManager(policy="layer-order", device="npu", host_bytes="64MiB") as manager:
            for _ in range(3):
                with manager.offload_context(model.blocks, min_bytes=1024):
                    loss = model(tokens, tokens.roll(1, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(loss.item().hex())
        """,
    )
    outputs = []
    for schedule in ("eager", "late", "random"):
        done = run(*EMULATOR, "--races", "--schedule", schedule, script, cwd=tmp_path, pythonpath=ROOT)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert len(set(outputs)) == 1
    assert len(outputs[0].splitlines()) == 3


TRAIN = """
    import json
    import ascend_emulator
    import torch
    from emulator.tests.gpt import CONTEXT, GPT, VOCABULARY
    from tiered_mem import TieringManager
    torch.manual_seed(0)
    model = GPT(modern=False).to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (4, CONTEXT)).to("npu")
    with TieringManager(policy="layer-order", device="npu", host_bytes="64MiB") as manager:
        with ascend_emulator.record_timeline() as spans:
            for _ in range(3):
                with manager.offload_context(model.blocks, min_bytes=1024):
                    loss = model(tokens, tokens.roll(1, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(loss.item().hex(), ascend_emulator.now())
            torch.npu.synchronize()
    print(json.dumps(spans))
"""


@pytest.mark.slow(why="six processes train a model")
def test_a_training_that_offloads_has_one_timeline(tmp_path: Path) -> None:
    """In each schedule, whether or not torch_npu's task queue is asked for, and with or without the detector."""
    script = write_script(tmp_path, TRAIN)
    outputs = {}
    for options, queue in {
        ("--schedule", "eager"): "2",
        ("--schedule", "eager", "--races"): "0",
        ("--schedule", "eager", "--no-poison"): "1",
        ("--schedule", "late"): "1",
        ("--schedule", "random", "--seed", "1"): "1",
        ("--schedule", "random", "--seed", "2", "--races"): "0",
    }.items():
        arguments = (*EMULATOR, *machine(tmp_path), *options, script)
        done = run(*arguments, cwd=tmp_path, pythonpath=ROOT, TASK_QUEUE_ENABLE=queue)
        assert done.returncode == 0, done.stderr
        outputs[options] = done.stdout.splitlines()
    first, *others = outputs.values()
    names = {name for name, *_ in json.loads(first[-1])}
    assert {"copy_d2h", "copy_h2d", "aclnnAddmm"} <= names
    assert others == [first] * 5
