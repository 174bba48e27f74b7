"""How far an estimate is from the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamiq_core.errors import InputError


def vnmse(estimate: Tensor, exact: Tensor) -> float:
    """Vector-normalised mean squared error ``|estimate - exact|**2 / |exact|**2``, computed in float64.

    Args:
        estimate: any real tensor.
        exact: a real tensor of the same shape.

    Returns:
        The error; 0.0 when both are zero everywhere, infinity when only ``exact`` is.

    Raises:
        InputError: the shapes differ.
    """
    if estimate.shape != exact.shape:
        raise InputError(f"estimate and exact differ in shape: {tuple(estimate.shape)} and {tuple(exact.shape)}")
    truth = exact.detach().to(torch.float64)
    error = (estimate.detach().to(torch.float64) - truth).square().sum().item()
    energy = truth.square().sum().item()
    if energy == 0:
        return 0.0 if error == 0 else float("inf")
    return error / energy
