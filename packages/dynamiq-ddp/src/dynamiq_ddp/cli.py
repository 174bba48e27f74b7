"""What is installed, what compression does to your gradients, and what it is worth on your network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dynamiq_core import DynamiQError
from dynamiq_transport import TransportError

from .commands import bench, compare, doctor, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``dynamiq-ddp``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dynamiq-ddp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, compare, bench, simulate):
        added = command.register(commands)
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument("--debug", action="store_true", help="show where an error comes from")
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (DynamiQError, TransportError, OSError) as error:
        if options.debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
