"""python -m tiered_mem.cli"""

import sys

from .command_line import main

sys.exit(main())
