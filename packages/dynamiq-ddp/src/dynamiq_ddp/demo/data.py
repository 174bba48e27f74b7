"""The demo's text: the source code of the running Python's standard library, byte by byte.

Real text that every machine with Python already has, so that nothing is downloaded. Batches are a function of
(seed, step, worker) alone, which lets two runs see the same data and lets one process replay all workers.

Shapes: B sequences, T bytes of context, W workers.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.errors import DynamiQError

VALIDATION_EVERY = 10
"""One file in so many is held out."""


class Corpus(NamedTuple):
    """Text as uint8 [bytes]; no file is in both parts."""

    train: Tensor
    validation: Tensor


class Batch(NamedTuple):
    """int64 [B, T] each; the target is the byte that follows."""

    inputs: Tensor
    targets: Tensor


def source_files(root: Path | None = None) -> list[Path]:
    """List the standard library's own source files, sorted by path below ``root``.

    Third-party packages that are installed below the same directory, and the library's tests, are left out.

    Args:
        root: directory to search; that of the running Python's standard library when None.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    # By name: searching all of the directory would walk through every installed package as well.
    modules = (root / f"{name}.py" for name in sys.stdlib_module_names)
    packages = (path for name in sys.stdlib_module_names for path in (root / name).rglob("*.py"))
    files = [path for path in modules if path.is_file()]
    files += [path for path in packages if not {"test", "tests"} & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus and split it by file.

    Args:
        root: as for :func:`source_files`.

    Raises:
        DynamiQError: the directory holds too little source text (some Python distributions ship none).
    """
    files = source_files(root)
    if len(files) < VALIDATION_EVERY:
        where = sysconfig.get_path("stdlib") if root is None else root
        raise DynamiQError(
            f"found {len(files)} source files of the standard library in {where}, need {VALIDATION_EVERY} or more"
        )
    held_out = slice(VALIDATION_EVERY - 1, None, VALIDATION_EVERY)
    validation = files[held_out]
    del files[held_out]
    return Corpus(train=_read(files), validation=_read(validation))


def batch(text: Tensor, *, size: int, context: int, step: int, worker: int, seed: int) -> Batch:
    """Draw one worker's batch of one step.

    Args:
        text: uint8 [bytes], one part of the corpus.
        size: sequences in a batch B.
        context: bytes of a sequence T.
        step: training step.
        worker: index of the worker.
        seed: seed of the run.
    """
    stream = random.Random(f"{seed}/{step}/{worker}")
    starts = torch.tensor([stream.randrange(text.numel() - context) for _ in range(size)])
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return Batch(inputs=windows[:, :-1], targets=windows[:, 1:])


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)
