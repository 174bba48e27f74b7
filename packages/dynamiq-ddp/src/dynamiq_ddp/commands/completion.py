"""Print a script that completes commands, options and their words at the press of Tab.

  bash, in ~/.bashrc or as a file of its own:

      eval "$(dynamiq-ddp completion bash)"
      dynamiq-ddp completion bash > ~/.local/share/bash-completion/completions/dynamiq-ddp

  zsh, into a folder of $fpath, before compinit runs:

      dynamiq-ddp completion zsh > ~/.zfunc/_dynamiq-ddp

  fish:

      dynamiq-ddp completion fish > ~/.config/fish/completions/dynamiq-ddp.fish

It prints the script and changes nothing. The script holds all that it needs, so that Tab starts no Python, which would
have to import torch first. Make it anew after an update. Of the words after one option, such as schedules, bash
completes all, zsh and fish the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from . import output

SHELLS = ("bash", "zsh", "fish")

FILES = "file"
"""Completes to names of files."""


def complete(action: argparse.Action, candidates: Iterable[str]) -> None:
    """Tell the shells what an argument may be, though others are allowed as well.

    Args:
        action: the argument.
        candidates: words, the same wherever an argument has this name; or `FILES`.
    """
    words, function = " ".join(candidates), f"_dynamiq_ddp_{action.dest}"
    by_shell = {
        "bash": function,
        "zsh": f"({words})",
        "fish": words,
        "preamble": {"bash": f"{function}() {{\n  compgen -W '{words}' -- \"$1\"\n}}"},
    }
    action.complete = FILES if candidates == FILES else by_shell  # type: ignore[attr-defined]  # where shtab looks


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion", help="a script for your shell, which completes what you type", description=__doc__
    )
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    parser.set_defaults(run=run, json=False, on_every_rank=False)
    return parser


def run(options: argparse.Namespace) -> output.Result:
    """Make the script."""
    import shtab

    return output.Result({}, shtab.complete(options.parser, options.shell))
