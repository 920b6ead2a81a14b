"""``python -m coati_perf``, and with it ``torchrun -m coati_perf``."""

import sys

from coati_perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
