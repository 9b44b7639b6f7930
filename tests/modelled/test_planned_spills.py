"""Modelled trainings that fit neither the device nor the host, and share them by plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import machine
from tests.modelled.test_modelled_drives import offer

TRAINING = """
    import json
    import sys
    from pathlib import Path

    import ascend_emulator
    import torch
    from torch import nn

    from tiered_mem import TieringManager
    from tiered_mem.policies import HostPressure, LayerOrderPolicy

    LAYERS, WIDTH, ROWS, STEPS = 8, 1024, 8192, 4

    def block():
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).bfloat16()

    def train(policy=None, **tiers):
        # pressed: steps after the first in which the policy was told of pressure.
        model = nn.Sequential(*(block() for _ in range(LAYERS))).to("npu")
        x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="npu")
        pressed = []
        step = 0
        manager = policy and TieringManager(policy=policy, device="npu", **tiers)
        if manager:
            decide = manager._policy.decide
            def counted(event):
                if step and isinstance(event, HostPressure):
                    pressed.append(step)
                return decide(event)
            manager._policy.decide = counted
            manager.attach(model, min_bytes=4096)
        for step in range(STEPS):
            torch.npu.synchronize()
            began = ascend_emulator.now()
            model(x).float().pow(2).mean().backward()
            for parameter in model.parameters():
                parameter.grad = None
            torch.npu.synchronize()
            seconds = ascend_emulator.now() - began
        said = {"seconds": seconds, "peak": torch.npu.max_memory_allocated(), "pressed": pressed}
        if manager:
            stats = manager.stats()
            said |= {"host": stats["host.used.peak"], "spilled": stats.get("spilled.bytes.total", 0)}
            manager.close()
        torch.npu.reset_peak_memory_stats()
        return said

    Path("spill").mkdir()
    floor = 2 * sum(parameter.nbytes for _ in range(LAYERS) for parameter in block().parameters())
    said = {"plain": train()}
    budget = int(floor + 0.3 * (said["plain"]["peak"] - floor))
    said["roomy"] = train("auto", device_budget=budget, host_bytes="2GiB")
    for share in (0.6, 0.4, 0.25):
        host = int(share * said["roomy"]["host"])
        tiers = {"host_bytes": host, "spill_dir": "spill", "spill_bytes": "8GiB"}
        planned = train("auto", device_budget=budget, **tiers)
        others = [
            train(LayerOrderPolicy(layers, in_flight=in_flight), **tiers)
            for layers in range(LAYERS // 2, LAYERS + 1)
            for in_flight in (0, 1)
        ] if share > 0.5 else []
        best = min((other["seconds"] for other in others if other["peak"] <= budget), default=None)
        said[str(share)] = {"planned": planned, "best": best, "host_bytes": host, "budget": budget}
    print(json.dumps(said))
"""


@pytest.mark.slow(why="a process that trains a model sixty times over")
def test_a_planned_drive_is_as_good_as_the_best_order_of_layers_under_pressure(tmp_path: Path) -> None:
    offer(tmp_path)
    script = write_script(tmp_path, TRAINING)
    done = run(*EMULATOR, *machine(tmp_path), "--dry", script, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(said, indent=1))
    for share in ("0.6", "0.4", "0.25"):
        planned = said[share]["planned"]
        assert planned["peak"] <= said[share]["budget"]
        assert planned["host"] <= said[share]["host_bytes"]
        assert planned["spilled"] > 0
    assert said["0.6"]["planned"]["pressed"] == []
    assert said["0.6"]["best"] is not None
    assert said["0.6"]["planned"]["seconds"] <= 1.02 * said["0.6"]["best"]


STATES = """
    import json

    import ascend_emulator
    import torch
    from torch import nn

    from tiered_mem import TieringManager

    LAYERS, WIDTH, ROWS, STEPS = 6, 1024, 8192, 5

    def block():
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def train(residency, budget):
        model = nn.Sequential(*(block() for _ in range(LAYERS))).to("npu")
        x = torch.zeros(ROWS, WIDTH, device="npu")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        manager = None
        if residency:
            manager = TieringManager(policy="auto", device="npu", device_budget=budget, host_bytes="4GiB")
            manager.attach(model, min_bytes=4096)
            optimizer = manager.register_optimizer(optimizer, residency=residency, bucket_bytes="32MiB")
        for step in range(STEPS):
            torch.npu.synchronize()
            began = ascend_emulator.now()
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.npu.synchronize()
            seconds = ascend_emulator.now() - began
        said = {"seconds": seconds, "peak": torch.npu.max_memory_allocated()}
        if manager:
            said |= {"kept": optimizer.states.pipeline.kept, "states": optimizer.states.pipeline.nbytes}
            manager.close()
        del model, optimizer
        torch.npu.reset_peak_memory_stats()
        return said

    said = {"plain": train(None, 0)}
    for share in (1.2, 0.85, 0.7):
        budget = int(share * said["plain"]["peak"])
        said[str(share)] = {"budget": budget} | {each: train(each, budget) for each in ("host", "auto")}
    print(json.dumps(said))
"""


@pytest.mark.slow(why="a process that trains a model seven times")
def test_states_that_stay_make_steps_shorter_and_keep_the_budget(tmp_path: Path) -> None:
    offer(tmp_path)
    script = write_script(tmp_path, STATES)
    done = run(*EMULATOR, *machine(tmp_path), "--dry", script, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(said, indent=1))
    for share in ("1.2", "0.85", "0.7"):
        host, auto = said[share]["host"], said[share]["auto"]
        assert max(auto["peak"], host["peak"]) <= said[share]["budget"]
        assert auto["kept"] == auto["states"]  # what has to leave in their place is hidden
        assert auto["seconds"] < 0.95 * host["seconds"]
