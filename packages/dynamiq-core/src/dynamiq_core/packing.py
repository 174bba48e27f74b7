"""Bit planes: codes of any width packed without waste.

A plane of a super-group is a bitmap of 32 bytes, least significant bit first: bit q of byte t of plane p is bit p of
the code of coordinate 8 t + q. Lane t of a GPU warp owns byte t of every plane and the eight neighbouring coordinates
that belong to it, half a group: it loads them as vectors and finds the maximum of a group with one shuffle.

Shapes: m super-groups, S = 256 coordinates, 32 lanes of 8 coordinates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynamiq_core.config import MAX_WIDTH, SUPER_GROUP

PLANE = SUPER_GROUP // 8
"""Bytes of a plane."""


def to_planes(codes: Tensor) -> Tensor:
    """All eight planes of the codes: uint8 [m, 8, 32] for codes uint8 [m, 256]."""
    weights = 1 << torch.arange(8, device=codes.device)
    bits = (codes.to(torch.int64).view(-1, 1, PLANE, 8) >> _planes(codes)[:, None, None]) & 1
    return (bits * weights).sum(dim=3).to(torch.uint8)


def from_planes(planes: Tensor) -> Tensor:
    """The codes of eight planes: uint8 [m, 256] for planes uint8 [m, 8, 32]."""
    lane_bits = torch.arange(8, device=planes.device)
    bits = (planes.to(torch.int64).unsqueeze(3) >> lane_bits) & 1
    codes = (bits << _planes(planes)[:, None, None]).sum(dim=1)
    return codes.reshape(-1, SUPER_GROUP).to(torch.uint8)


def pack(codes: Tensor, widths: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Write the planes of every super-group into a message.

    Args:
        codes: uint8 [m, 256]; bits above a super-group's width are not written.
        widths: int [m], planes of each super-group.
        offsets: int [m], byte at which its first plane starts.
        out: uint8 [bytes], written in place.
    """
    where, present = _addresses(widths, offsets)
    # Planes that do not exist go to one byte past the end, which is then dropped: no host read of the mask.
    padded = torch.cat((out, out.new_zeros(1)))
    padded[torch.where(present, where, out.numel()).flatten()] = to_planes(codes).flatten()
    out.copy_(padded[:-1])


def unpack(message: Tensor, widths: Tensor, offsets: Tensor) -> Tensor:
    """Read the codes back: uint8 [m, 256], zero where the width is 0. Arguments as in `pack`."""
    where, present = _addresses(widths, offsets)
    padded = torch.cat((message, message.new_zeros(1)))
    return from_planes(padded[torch.where(present, where, message.numel())])


def _addresses(widths: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    plane = _planes(widths)
    lane = torch.arange(PLANE, device=widths.device)
    where = offsets.to(torch.int64)[:, None, None] + plane[:, None] * PLANE + lane
    present = (plane < widths[:, None])[:, :, None].expand_as(where)
    return where, present


def _planes(like: Tensor) -> Tensor:
    return torch.arange(MAX_WIDTH, device=like.device)
