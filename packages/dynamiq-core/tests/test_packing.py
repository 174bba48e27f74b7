from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynamiq_core.packing import PLANE, from_planes, pack, to_planes, unpack


def every_code_in_every_place() -> Tensor:
    """uint8 [256, 256]: row r holds code (c + r) mod 256 at coordinate c."""
    return (torch.arange(256) + torch.arange(256)[:, None]).to(torch.uint8)


def test_every_code_of_every_coordinate_survives() -> None:
    codes = every_code_in_every_place()
    assert torch.equal(from_planes(to_planes(codes)), codes)


@pytest.mark.parametrize("width", range(1, 9))
def test_every_code_of_a_width_in_every_place_of_a_message(width: int) -> None:
    codes = every_code_in_every_place()[: 2**width] & (2**width - 1)
    widths = torch.full((len(codes),), width)
    offsets = torch.arange(len(codes)) * width * PLANE
    message = torch.full((len(codes) * width * PLANE,), 0xAA, dtype=torch.uint8)
    pack(codes, widths, offsets, message)
    assert torch.equal(unpack(message, widths, offsets), codes)


def test_where_every_bit_lies() -> None:
    """Bit q of byte t of plane p is bit p of the code of coordinate 8 t + q, spelled out one by one."""
    codes = torch.randint(256, (2, 256), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    widths, offsets = [8, 3], [3 * PLANE, 0]
    message = torch.full((12 * PLANE,), 0x55, dtype=torch.uint8)
    pack(codes, torch.tensor(widths), torch.tensor(offsets), message)
    for row in range(2):
        for plane in range(widths[row]):
            for byte in range(32):
                expected = sum((int(codes[row, 8 * byte + bit]) >> plane & 1) << bit for bit in range(8))
                assert message[offsets[row] + 32 * plane + byte] == expected
    assert (message[11 * PLANE :] == 0x55).all()  # a plane that belongs to nobody is left alone


def test_a_single_bit_at_the_very_end() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 255] = 0x80
    planes = to_planes(codes)
    assert planes[0, 7, 31] == 0x80
    assert planes.long().sum() == 0x80


def test_bits_above_the_width_are_not_sent_and_width_zero_sends_nothing() -> None:
    codes = every_code_in_every_place()[:9]
    widths = torch.arange(9)
    offsets = (widths * PLANE).cumsum(0) - widths * PLANE
    message = torch.zeros(36 * PLANE, dtype=torch.uint8)
    pack(codes, widths, offsets, message)
    assert torch.equal(unpack(message, widths, offsets), codes & ((1 << widths) - 1)[:, None])


def test_super_groups_may_lie_in_any_order() -> None:
    codes = every_code_in_every_place()[:3] % 4
    widths, offsets = torch.full((3,), 2), torch.tensor([128, 0, 64])
    message = torch.zeros(192, dtype=torch.uint8)
    pack(codes, widths, offsets, message)
    assert torch.equal(unpack(message, widths, offsets), codes)
    assert torch.equal(message[:64], to_planes(codes)[1, :2].flatten())


def test_nothing_to_pack() -> None:
    message = torch.full((5,), 7, dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    pack(torch.zeros(0, 256, dtype=torch.uint8), none, none, message)
    assert (message == 7).all()
    assert unpack(message, none, none).shape == (0, 256)
