"""Which backend computes the codec's operations: decided here and nowhere else.

A backend is a module like `dynamiq_core.reference`. It is imported when it is chosen, so that the package can be
imported without Numba, without Triton and without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Literal, get_args

import torch

from dynamiq_core import BackendError, Operations, reference

Backend = Literal["auto", "reference", "numba", "triton"]
"""What a user can ask for."""


def operations(backend: Backend = "auto", device: torch.device | str = "cpu") -> Operations:
    """The codec's operations for tensors on a device.

    Args:
        backend: ``"reference"`` computes with plain torch operations on any device, ``"numba"`` on CPUs, ``"triton"``
            on CUDA and ROCm devices. ``"auto"`` takes the fastest that can run: Triton on such a device, Numba on a
            CPU, and the reference where that one is not installed, which is hundreds of times slower.
        device: where the tensors live.

    Returns:
        The operations, to be given to `dynamiq_core.DynamiQ`; their ``name`` says which backend it is.

    Raises:
        BackendError: the backend is unknown or cannot run here; the message says why.

    Example:
        >>> operations("reference").name
        'reference'
    """
    device = torch.device(device)
    if backend not in get_args(Backend):
        raise BackendError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, not {backend!r}")
    if backend == "auto":
        backend = _fastest(device)
    obstacle = _obstacle(backend, device)
    if obstacle is not None:
        raise BackendError(f"backend {backend!r} cannot run on {device.type!r}: {obstacle}")
    if backend == "reference":
        return reference
    try:
        module: Operations = importlib.import_module(f"dynamiq_kernels.{backend}")
    except ImportError as error:
        raise BackendError(f"backend {backend!r} cannot be imported: {error}") from error
    return module


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Names of the backends that can run on a device, the one that ``"auto"`` takes first.

    >>> "reference" in available_backends("cpu")
    True
    """
    device = torch.device(device)
    names = [name for name in get_args(Backend) if name != "auto" and _obstacle(name, device) is None]
    return tuple(sorted(names, key=lambda name: name != _fastest(device)))


def _fastest(device: torch.device) -> Backend:
    preferred: Backend = "triton" if device.type == "cuda" else "numba"
    return preferred if _obstacle(preferred, device) is None else "reference"


def _obstacle(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device, or None."""
    if backend == "numba":
        if device.type != "cpu":
            return "it computes on CPUs only"
        return _missing("numba", extra="cpu")
    if backend == "triton":
        if device.type != "cuda" and not (device.type == "cpu" and _interpreting()):
            return "it computes on GPUs; on CPUs its interpreter does, for tests, if TRITON_INTERPRET=1 is set"
        return _missing("triton", extra="triton")
    return None


def _missing(module: str, *, extra: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f'{module} is not installed; pip install "dynamiq-kernels[{extra}]" does it'
    return None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
