"""`python -m tiered_mem.check`, by which the command line starts the process in which checks run."""

import sys

from .worker import main

sys.exit(main(sys.argv[1:]))
