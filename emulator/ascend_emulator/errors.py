"""What can be wrong before the emulated device is there."""


class EmulatorError(RuntimeError):
    """The emulated device cannot be started; the message says what to do."""
