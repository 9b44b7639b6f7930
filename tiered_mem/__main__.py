"""python -m tiered_mem: the command `tiered-mem`."""

import sys

from .cli import main

sys.exit(main())
