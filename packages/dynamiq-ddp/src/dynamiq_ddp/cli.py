"""The command line, ``dynamiq-ddp`` or ``python -m dynamiq_ddp``: arguments, results, and errors in one line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from dynamiq_core import __version__

from .commands import bench, compare, completion, demo, doctor, output, simulate
from .guard import guarded
from .launched import rank_here

DESCRIPTION = """\
What is installed, what compression does to your gradients, and what it is worth on your network.

  A machine that is new to you:      dynamiq-ddp doctor
  Does it train as well?             torchrun --standalone --nproc-per-node 4 --no-python dynamiq-ddp demo
  Which codec for my gradients?      dynamiq-ddp compare gradients/step100-*.pt
  Does it pay on my network?         torchrun --nproc-per-node 4 --no-python dynamiq-ddp bench
  And with more ranks than I have?   dynamiq-ddp simulate --ranks 4 64 1024
"""

ENDING = """\
Every command that has results prints them as a table, or with --json as one JSON document; progress, warnings and
errors go to standard error. Where a launcher has started several ranks, rank 0 prints.

exit status:
  0    done
  1    something unexpected, which --debug shows in full; please report it
  2    an option, a file, an installation or another rank is not as it has to be; one line says how
  130  interrupted by Ctrl-C
  141  whoever reads the output has closed it
"""

CLOSED = 141


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="dynamiq-ddp", description=DESCRIPTION, epilog=ENDING, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"dynamiq-ddp {__version__}", help="print the version")
    commands = top.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
    for command in (doctor, demo, compare, bench, simulate, completion):
        added = command.register(commands)
        added.formatter_class = raw
        added.epilog = "exit status: 0 done, 2 an error in one line, others as `dynamiq-ddp --help` says"
        added.add_argument("--debug", action="store_true", help="show where an error comes from")
    top.set_defaults(parser=top)  # of which `completion` makes a script
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """What ``dynamiq-ddp`` does; returns the exit status."""
    options = parser().parse_args(arguments)
    return guarded(lambda: _run(options), debug=options.debug)


def entry(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``dynamiq-ddp``: `main` in a process of its own."""
    # Ctrl-C ends the process as it ends others: at once, whatever threads and C code are busy with, and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return main(arguments)


def _run(options: argparse.Namespace) -> int:
    if rank_here() != 0 and not options.on_every_rank:
        return 0
    with output.results_only():
        result: output.Result | None = options.run(options)
    if result is None:
        return 0
    try:
        with ExitStack() as stack:  # which calls all of them, whatever goes wrong before
            for save in reversed(result.saves):
                stack.callback(save)
            output.write(output.to_json(result.document) if options.json else result.text)
    except BrokenPipeError:
        return CLOSED
    return 0


if __name__ == "__main__":
    sys.exit(entry())
