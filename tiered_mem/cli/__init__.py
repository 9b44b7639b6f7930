"""The command line, `tiered-mem`. `import tiered_mem` does not bring it in, nor rich."""

from .command_line import main

__all__ = ["main"]
