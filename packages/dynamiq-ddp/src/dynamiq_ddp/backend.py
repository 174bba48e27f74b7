"""Where the codec's arithmetic and the kernels that carry it out are put together."""

from __future__ import annotations

import torch

from dynamiq_core import BackendError, CodecConfig, DynamiQ


def make_codec(config: CodecConfig, backend: str, device: torch.device) -> DynamiQ:
    """A codec whose operations run on one device.

    Args:
        config: the codec's parameters.
        backend: ``"auto"`` or ``"reference"``.
        device: where the gradients live.

    Raises:
        BackendError: the backend cannot run on this device.
    """
    if backend not in ("auto", "reference"):
        raise BackendError(f"backend {backend!r} cannot run on {device}; allowed: 'auto', 'reference'")
    return DynamiQ(config)
