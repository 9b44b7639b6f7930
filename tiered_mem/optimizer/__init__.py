"""Optimizer states in the pool: they pass through the device bucket by bucket while the optimizer steps."""
