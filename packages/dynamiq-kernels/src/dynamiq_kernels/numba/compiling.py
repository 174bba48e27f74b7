"""How kernels are compiled, and when a compiled kernel on disk is still good."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

import dynamiq_core

device: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(inline="always", error_model="numpy")
"""A part of kernels, inlined before types are inferred: LLVM sees one function and knows what does not alias."""

subroutine: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(error_model="numpy")
"""A part of kernels that touches one array only and is called: it is compiled once."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled loop over super-groups, kept on disk.

    The GIL is released. Divisions never raise: a check in a loop would keep it from being vectorised.
    """
    try:
        dispatcher: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package nor the home directory can be written
        return njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    # Numba looks at the kernel's own file alone, and would keep a kernel whose parts have changed.
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, SOURCES)
    return dispatcher  # type: ignore[no-any-return]


def _digest_of_sources() -> str:
    """A digest of every file that a kernel is made of."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(dynamiq_core.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _digest_of_sources()
