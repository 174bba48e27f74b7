"""``python -m dynamiq_ddp.demo`` is ``dynamiq-ddp demo``."""

import sys

from dynamiq_ddp.cli import entry

if __name__ == "__main__":
    sys.exit(entry(["demo", *sys.argv[1:]]))
