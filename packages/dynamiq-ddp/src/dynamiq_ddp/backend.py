"""Where the codec's arithmetic and the kernels that carry it out are put together."""

from __future__ import annotations

import torch

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_kernels import Backend, operations, warmup


def make_codec(config: CodecConfig, backend: Backend, device: torch.device) -> DynamiQ:
    """A codec whose operations run on one device, compiled and ready.

    Args:
        config: the codec's parameters.
        backend: what carries out the operations; see `dynamiq_kernels.operations`.
        device: where the gradients live.

    Raises:
        BackendError: the backend is unknown or cannot run on this device.
    """
    chosen = operations(backend, device)
    warmup(chosen, device, config=config)
    return DynamiQ(config, operations=chosen)
