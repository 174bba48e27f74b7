"""Hierarchical scales: one bfloat16 per super-group and a small code per group relative to it.

*log*: group scale = super scale * 2**(-k / 4) for k = 0..14, the smallest that is not below the group's largest
magnitude, so entries never clip and are unbiased given the scale; k = 15 says that the group is zero. Encoders multiply
by the reciprocal of the super scale, of which there is one for 16 groups, and by the reciprocal of the ratio, from a
table.
*linear*: group scale = super scale * k / 255 with k stochastically rounded, entries normalised by the true maximum:
two independent unbiased factors (the hierarchical quantisation of arXiv 2602.08923).

A super-group with a non-finite value gets the super scale +inf, and every entry decodes as non-finite; so does one
whose largest magnitude is 2**125 or more, a factor of eight from overflow: not far beyond, reciprocals are subnormal
numbers. A super-group or a group whose largest magnitude is below 2**-120 is treated as zero, so that reciprocals stay
finite.

Shapes: m super-groups of 16 groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core.config import GROUPS, Scales
from dynamiq_core.constants import constant
from dynamiq_core.levels import MARGIN
from dynamiq_core.rounding import centred

SUPER_BYTES = 2
SMALLEST = 2.0**-120
TOO_LARGE = 2.0**125
RATIOS = tuple(2.0 ** (-k / 4) for k in range(15))
INVERSE_RATIOS = (*(MARGIN * 2.0 ** (k / 4) for k in range(15)), 0.0)
"""By which an encoder multiplies, for every code."""
ZERO_CODE = 15
STEPS = 255


class EncodedScales(NamedTuple):
    """What is sent, and what the encoder divides by."""

    super_scale: Tensor  # bfloat16 [m]
    codes: Tensor  # uint8 [m, 16]
    inverse: Tensor  # float32 [m, 16]: entries times this lie in [-1, 1]; 0 for a zero or non-finite group


def group_bytes(scales: Scales) -> int:
    """Bytes of the 16 group codes of one super-group."""
    return {"log": GROUPS // 2, "linear": GROUPS}[scales]


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """The smallest bfloat16 not below ``x`` (float32, non-negative)."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).to(torch.bfloat16)


def encode_scales(maxima: Tensor, scales: Scales, draw: Tensor | None = None) -> EncodedScales:
    """Scales of every group.

    Args:
        maxima: float32 [m, 16], largest magnitude of each group; non-finite if the group holds such a value.
        scales: the kind.
        draw: int64 [m, 16], 16-bit draws of the groups, needed by ``"linear"``.
    """
    largest = maxima.amax(dim=1)
    finite = (maxima < TOO_LARGE).all(dim=1)
    usable = torch.where(largest < SMALLEST, 0.0, largest)
    super_scale = round_up_to_bfloat16(torch.where(finite, usable, torch.inf))
    maxima = torch.where(finite[:, None] & (maxima >= SMALLEST), maxima, 0.0)
    top = super_scale.to(torch.float32)[:, None]
    if scales == "log":
        ratios = constant(RATIOS, torch.float32, maxima.device)
        enough = top.unsqueeze(2) * ratios[1:] >= maxima.unsqueeze(2)
        code = torch.where((maxima > 0), enough.sum(dim=2), ZERO_CODE)
        code = torch.where(finite[:, None], code, 0)
        by_code = constant(INVERSE_RATIOS, torch.float32, maxima.device)[code]
        inverse = torch.where(finite[:, None], 1.0 / torch.where(top > 0, top, 1.0) * by_code, 0.0)
    else:
        assert draw is not None
        code = torch.floor(maxima * (STEPS / torch.where(top > 0, top, 1.0)) + centred(draw)).clamp(max=STEPS)
        code = torch.where(finite[:, None], torch.where(maxima > 0, code, 0.0), STEPS)
        inverse = torch.where(maxima > 0, MARGIN / torch.where(maxima > 0, maxima, 1.0), 0.0)
    return EncodedScales(super_scale, code.to(torch.uint8), inverse)


def decode_scales(super_scale: Tensor, codes: Tensor, scales: Scales) -> Tensor:
    """Group scales: float32 [m, 16] from bfloat16 [m] and uint8 [m, 16]."""
    top = super_scale.to(torch.float32)[:, None]
    if scales == "log":
        table = constant((*RATIOS, 0.0), torch.float32, codes.device)
        return top * table[codes.to(torch.int64)]
    return codes.to(torch.float32) * (top * (1.0 / STEPS))


def pack_codes(codes: Tensor, scales: Scales) -> Tensor:
    """Bytes of the group codes: uint8 [m, group_bytes]; byte i of ``"log"`` holds groups i (low) and i + 8 (high)."""
    if scales == "linear":
        return codes
    low, high = codes.to(torch.int32).chunk(2, dim=1)
    return (low | high << 4).to(torch.uint8)


def unpack_codes(packed: Tensor, scales: Scales) -> Tensor:
    """The group codes of `pack_codes`: uint8 [m, 16]."""
    if scales == "linear":
        return packed
    return torch.cat((packed & 15, packed >> 4), dim=1)
