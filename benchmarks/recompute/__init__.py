"""Layers that are computed again in backward, beside torch's checkpoint: `python -m benchmarks.recompute -h`."""
