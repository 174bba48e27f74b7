"""Reads one gradient per rank from ``.pt`` and ``.safetensors`` files.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from dynamiq_core import InputError

from .engine import DTYPES

READABLE = (torch.float64, *DTYPES)
"""What a file may hold; float64 becomes float32."""


def load_gradients(paths: Sequence[Path], *, limit: int | None = None) -> Tensor:
    """One row per rank, out of one file with all of them or out of several.

    A file holds a tensor [n, d], or several tensors of one size and of any shape: in a list, or under names. Names are
    sorted, and numbers in them count as numbers.

    Args:
        paths: files, in the order of the ranks.
        limit: read the first so many coordinates only.

    Returns:
        [n, d], float32 unless all tensors are bfloat16 or float16.

    Raises:
        InputError: a file cannot be read, or its tensors are not one gradient per rank.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be 1 or more coordinates, not {limit}")
    rows: list[Tensor] = []
    for path in paths:
        tensors = _load(path)
        if len(paths) == 1 and len(tensors) == 1 and tensors[0].dim() == 2:
            tensors = list(tensors[0])
        rows += [tensor.detach().flatten() for tensor in tensors]
    if len({row.numel() for row in rows}) != 1 or rows[0].numel() == 0:
        sizes = ", ".join(f"{row.numel():,}" for row in rows[:9])
        raise InputError(f"gradients must have the same number of coordinates on every rank, not {sizes}")
    dtypes = {row.dtype for row in rows}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return torch.stack([row[:limit] for row in rows]).to(torch.float32 if dtype == torch.float64 else dtype)


def _load(path: Path) -> list[Tensor]:
    try:
        held = _load_safetensors(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu")
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever an unpickler makes of bytes that are something else
        # Of a file that might run code, torch says how to let it.
        said = [] if isinstance(error, UnpicklingError) else str(error).splitlines()[:1]
        reason = f"it is no file of tensors ({': '.join([type(error).__name__, *said])})"
        raise InputError(f"{path} cannot be read: {reason}") from error
    if isinstance(held, Tensor):
        held = [held]
    if isinstance(held, Mapping):
        held = [held[name] for name in sorted(held, key=_natural)]
    if not isinstance(held, (list, tuple)) or not held or not all(isinstance(entry, Tensor) for entry in held):
        raise InputError(
            f"{path} holds no tensors, but {type(held).__name__}; allowed: a tensor [n, d], or one per rank"
        )
    for entry in held:
        if entry.layout != torch.strided or entry.is_meta:
            raise InputError(
                f"{path} holds a tensor that is {entry.layout} on {entry.device}; allowed: torch.strided, with data"
            )
        if entry.dtype not in READABLE:
            raise InputError(f"{path}: gradients cannot be {entry.dtype}; allowed: {', '.join(map(str, READABLE))}")
    return list(held)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(
            f"{path} needs the package safetensors, which the extra dynamiq-ddp[safetensors] brings"
        ) from error
    held: dict[str, Tensor] = load_file(path)
    return held


def _natural(name: object) -> list[tuple[int, str]]:
    """``rank10`` after ``rank9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(name))]
