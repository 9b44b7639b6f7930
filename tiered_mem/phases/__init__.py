"""Modules that leave the device for a phase of a training."""
