"""Integers of any width, and chunks of whole blocks."""

from __future__ import annotations

import pytest
import torch

from dynamiq_core import InputError
from dynamiq_core.baselines.blocks import block_plan, pack, unpack


@pytest.mark.parametrize("width", [*range(1, 18), 24, 25])
def test_packed_integers_come_back_and_fill_every_bit(width):
    codes = torch.randint(0, 2**width, (8 * 50,), generator=torch.Generator().manual_seed(width))
    codes[:8], codes[8:16] = 0, 2**width - 1
    packed = pack(codes, width)
    assert packed.shape == (50 * width,)
    assert torch.equal(unpack(packed, width), codes)
    # Every bit means something: with one flipped, exactly one code is another.
    for bit in range(0, 8 * packed.numel(), 97):
        flipped = packed.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        assert int((unpack(flipped, width) != codes).sum()) == 1


def test_layout_of_six_bits():
    """The first code lies in the lowest bits of the first byte."""
    codes = torch.tensor([0b000001, 0b100000, 0b111111, 0b010101, 0, 0, 0, 0b101010])
    bits = "".join(f"{code:06b}" for code in reversed(codes.tolist()))
    assert pack(codes, 6).tolist() == [int(bits[48 - 8 * k - 8 : 48 - 8 * k], 2) for k in range(6)]


@pytest.mark.parametrize(("numel", "chunks"), [(1, 1), (1, 5), (32, 2), (33, 2), (1000, 7), (4096, 3)])
def test_every_coordinate_is_in_one_chunk_and_padding_in_none(numel, chunks):
    plan = block_plan(numel, workers=2, chunks=chunks, block=32, block_bytes=5)
    x, out = torch.arange(1.0, numel + 1), torch.full((numel,), torch.nan)
    filled = 0
    for chunk, size in enumerate(plan.sizes):
        part = plan.blocks(x, chunk)
        assert part.shape == (size // 5, 32)
        filled += int((part == 0).sum())
        plan.write(part, out, chunk)
    assert torch.equal(out, x)
    assert filled == -numel % 32
    assert max(plan.sizes) - min(plan.sizes) <= 5


@pytest.mark.parametrize("bad", [{"numel": 0}, {"workers": -1}, {"chunks": 0}])
def test_sizes_must_be_positive(bad):
    with pytest.raises(InputError, match="must be positive"):
        block_plan(**{"numel": 1, "workers": 1, "chunks": 1, "block": 32, "block_bytes": 33, **bad})
