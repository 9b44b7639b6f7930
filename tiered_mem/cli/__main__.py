"""python -m tiered_mem.cli: the command `tiered-mem`."""

import sys

from .command_line import main

sys.exit(main())
