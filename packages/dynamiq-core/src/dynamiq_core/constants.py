"""Bringing constants to a device without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of numbers known on the host.

    ``torch.tensor(values, device=device)`` would wait until a GPU has done everything that it was given before.

    Args:
        values: the numbers.
        dtype: of the result.
        device: where it lives.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
