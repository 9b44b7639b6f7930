"""Modules and optimizers that leave the device for a phase of a training."""
