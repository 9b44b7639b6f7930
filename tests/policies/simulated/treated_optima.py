"""python -m tests.policies.simulated.treated_optima: solves small steps for each mixture exactly, and stores that.

Writes treated_optima.json. Needs scipy, and takes some minutes. The tests need neither.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from rich.progress import track

from tests.policies.simulated.optima import SHARES, optimum
from tests.policies.simulated.random_steps import LINK
from tests.policies.simulated.steps import budget_between
from tests.policies.simulated.treated import WAYS, small_model

STORED = Path(__file__).with_suffix(".json")
SEEDS = range(24)


def main() -> None:
    found = []
    for seed in track(SEEDS, "steps"):
        model, share = small_model(seed), SHARES[seed % len(SHARES)]
        budget = budget_between(model.recorded().profile, share)
        best = optimum(model.recorded().profile, budget, LINK)
        mixtures = [
            model.recorded({n: way for n, way in enumerate(ways) if way is not None}).profile
            for ways in itertools.product(WAYS, repeat=len(model.layers))
        ]
        for mixture in sorted(mixtures, key=lambda profile: profile.compute):
            if mixture.compute < best:
                try:
                    best = min(best, optimum(mixture, budget, LINK))
                except RuntimeError:
                    continue  # no plan keeps the budget
        found.append({"seed": seed, "share": share, "optimum": best})
        STORED.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    main()
