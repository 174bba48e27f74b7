from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dynamiq_core.config import Scales
from dynamiq_core.levels import level_table, positions
from dynamiq_core.scales import (
    SMALLEST,
    TOO_LARGE,
    ZERO_CODE,
    EncodedScales,
    decode_scales,
    encode_scales,
    group_bytes,
    pack_codes,
    round_up_to_bfloat16,
    unpack_codes,
)


def magnitudes(rows: int) -> Tensor:
    """float32 [rows, 16]: largest magnitudes of groups, over 12 octaves within a super-group and 200 between them."""
    generator = torch.Generator().manual_seed(0)
    exponents = -12 * torch.rand(rows, 16, generator=generator) + 200 * torch.rand(rows, 1, generator=generator) - 100
    return torch.exp2(exponents)


def encoded(maxima: Tensor, scales: Scales, draw: int = 0x8000) -> EncodedScales:
    return encode_scales(maxima, scales, torch.full(maxima.shape, draw))


def test_rounding_up_gives_the_nearest_bfloat16_from_above() -> None:
    x = torch.cat((magnitudes(500).flatten(), torch.tensor([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1e-40, 1e-45, 3e38])))
    up = round_up_to_bfloat16(x)
    assert (up.float() >= x).all()
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert (below.float() < x).all()


def test_rounding_up_keeps_every_bfloat16() -> None:
    every = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(round_up_to_bfloat16(every.float()), every)


def test_rounding_up_keeps_what_is_not_finite() -> None:
    up = round_up_to_bfloat16(torch.tensor([math.inf, math.nan]))
    assert up[0] == math.inf
    assert not torch.isfinite(up[1])


def test_log_scales_are_the_smallest_that_are_not_below_the_maximum() -> None:
    maxima = magnitudes(2000)
    coded = encoded(maxima, "log")
    scale = decode_scales(coded.super_scale, coded.codes, "log")
    assert (scale >= maxima).all()
    finer = decode_scales(coded.super_scale, (coded.codes + 1).clamp(max=14), "log")
    assert ((finer < maxima) | (coded.codes == 14)).all()
    assert (coded.codes < ZERO_CODE).all()
    top = coded.super_scale.double()[:, None]
    torch.testing.assert_close(scale.double(), top * 2 ** (-coded.codes.double() / 4), rtol=1e-6, atol=0)
    assert set(coded.codes.unique().tolist()) == set(range(15))


@pytest.mark.parametrize("scales", ["log", "linear"])
def test_entries_never_exceed_one(scales: Scales) -> None:
    maxima = torch.cat((magnitudes(2000), torch.full((1, 16), TOO_LARGE * (1 - 2**-24))))
    coded = encoded(maxima, scales)
    largest = maxima.double() * coded.inverse.double()
    assert (largest < 1).all()
    if scales == "linear":
        assert (largest > 1 - 2**-20).all()


@pytest.mark.parametrize("bend", [1.0, 1.5, 2.7, 4.0])
def test_no_position_passes_the_centre(bend: float) -> None:
    """All log scales there are, at widths of 1 to 8 bits: an entry as large as its scale, and one of each linear scale.

    A position beyond the centre could round to a code that does not exist. None falls short of it by more than twice
    the margin either: what is lost there would be a bias.
    """
    top = torch.arange(128, 256).float() / 128
    ratios = decode_scales(top.bfloat16(), torch.arange(15, dtype=torch.uint8).expand(128, 15), "log").flatten()
    maxima = torch.stack((top.repeat_interleave(15), ratios), dim=1)
    maxima = torch.cat((maxima, maxima[:, :1].expand(-1, 14)), dim=1)
    for scales, values in (("log", maxima), ("linear", torch.cat((maxima, magnitudes(10_000).clamp(1e-30, 1e30))))):
        inverse = encoded(values, scales).inverse
        for width in range(1, 9):
            row = level_table(bend)[width : width + 1]
            position = positions(values, inverse, row)
            assert (position <= row[0, 0]).all()
            assert (position >= row[0, 0] * (1 - 2**-20)).all()
            assert torch.equal(
                torch.round(position + (1 - 2**-16 + row[0, 0] - 0.5)), (2 * row[:1, :1]).expand_as(position)
            )


@pytest.mark.parametrize("scales", ["log", "linear"])
@pytest.mark.parametrize("draw", [0, 0xFFFF])
def test_zero_groups_are_exactly_zero(scales: Scales, draw: int) -> None:
    maxima = magnitudes(100)
    maxima[:50, ::3] = 0
    maxima[50] = 0
    coded = encoded(maxima, scales, draw)
    scale = decode_scales(coded.super_scale, coded.codes, scales)
    zero = maxima == 0
    assert (scale[zero] == 0).all()
    assert (coded.inverse[zero] == 0).all()
    assert (scale[~zero & (coded.codes > 0)] > 0).all()
    assert coded.super_scale[50] == 0


@pytest.mark.parametrize("scales", ["log", "linear"])
def test_what_is_too_small_for_a_reciprocal_counts_as_zero(scales: Scales) -> None:
    """Nothing subnormal, no infinite reciprocal: from 2**-120 upwards a super-group is quantised, below it is zero."""
    maxima = torch.full((3, 16), SMALLEST)
    maxima[1] *= 1 - 2**-24
    maxima[2] = 1e-42
    coded = encoded(maxima, scales)
    assert coded.super_scale.tolist() == [SMALLEST, 0, 0]
    assert torch.isfinite(coded.inverse).all()
    scale = decode_scales(coded.super_scale, coded.codes, scales)
    torch.testing.assert_close(scale[0], maxima[0], rtol=1e-6, atol=0)
    assert (scale[1:] == 0).all()


@pytest.mark.parametrize("scales", ["log", "linear"])
def test_a_small_group_beside_larger_ones_is_zero_rather_than_divided_by(scales: Scales) -> None:
    """The reciprocal of 1e-39 is infinite, and zero times infinity would be the code of a NaN."""
    maxima = torch.full((1, 16), 1e-36)
    maxima[0, 3] = 1e-39
    coded = encoded(maxima, scales, 0xFFFF)
    assert torch.isfinite(coded.inverse).all()
    assert coded.inverse[0, 3] == 0
    assert decode_scales(coded.super_scale, coded.codes, scales)[0, 3] == 0


@pytest.mark.parametrize("scales", ["log", "linear"])
def test_a_factor_of_eight_from_the_largest_float_is_overflow(scales: Scales) -> None:
    """Beyond, a reciprocal would be subnormal, which not every device computes alike."""
    maxima = torch.tensor([TOO_LARGE * (1 - 2**-24), TOO_LARGE])[:, None].expand(2, 16)
    coded = encoded(maxima, scales)
    scale = decode_scales(coded.super_scale, coded.codes, scales)
    torch.testing.assert_close(scale[0], maxima[0], rtol=2**-8, atol=0)
    assert (coded.inverse[0] >= torch.finfo(torch.float32).tiny).all()
    assert coded.super_scale[1] == math.inf
    assert (coded.inverse[1] == 0).all()


@pytest.mark.parametrize("scales", ["log", "linear"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_non_finite_group_makes_the_super_group_non_finite_and_no_other(scales: Scales, bad: float) -> None:
    maxima = magnitudes(3)
    clean = encoded(maxima, scales)
    maxima[1, 5] = bad
    coded = encoded(maxima, scales)
    assert coded.super_scale[1] == math.inf
    assert not torch.isfinite(decode_scales(coded.super_scale, coded.codes, scales)[1]).any()
    assert (coded.inverse[1] == 0).all()
    for got, expected in zip(coded, clean, strict=True):
        assert torch.equal(got[[0, 2]], expected[[0, 2]])


def test_linear_scales_are_unbiased_over_all_draws() -> None:
    """Exhaustive over the 2**16 draws; the steps of a code are 1/255 of the super scale."""
    maxima = torch.tensor(
        [1.0, 0.999, 0.5, 1 / 3, 0.1, 0.01, 1 / 255, 0.003, 0.001, 1e-4, 1e-5, 0.9, 0.8, 0.7, 0.6, 0.2]
    )
    draw = torch.arange(2**16)[:, None].expand(-1, 16)
    coded = encode_scales(maxima.expand(2**16, 16), "linear", draw)
    scale = decode_scales(coded.super_scale, coded.codes, "linear").double()
    torch.testing.assert_close(scale.mean(dim=0), maxima.double(), rtol=2e-7, atol=2**-16 / 255)
    assert (scale - maxima).abs().max() < 1 / 255 + 1e-6
    assert (coded.codes.float().diff(dim=0) >= 0).all()


def test_layout_of_the_group_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert pack_codes(codes, "log")[0].tolist() == [i | (i + 8) << 4 for i in range(8)]
    assert pack_codes(codes * 17, "linear")[0].tolist() == [17 * i for i in range(16)]


@pytest.mark.parametrize(("scales", "largest"), [("log", 15), ("linear", 255)])
def test_every_group_code_in_every_place_survives(scales: Scales, largest: int) -> None:
    codes = ((torch.arange(largest + 1)[:, None] + torch.arange(16)) % (largest + 1)).to(torch.uint8)
    packed = pack_codes(codes, scales)
    assert packed.shape == (largest + 1, group_bytes(scales))
    assert torch.equal(unpack_codes(packed, scales), codes)
