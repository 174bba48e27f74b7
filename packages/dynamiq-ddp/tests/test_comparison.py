"""The figures of a comparison, each against what it must be for a codec whose error is known."""

from __future__ import annotations

import math

import pytest
import torch

from dynamiq_core import InputError
from dynamiq_core.baselines import BF16, MXFP8, THC, OmniReduce
from dynamiq_ddp.comparison import bias, compare, cosine
from dynamiq_ddp.exact import Exact


def test_bits_count_every_byte_over_what_an_all_reduce_must_move(random_rows):
    rows = random_rows(4, 32 * 4 * 100)
    rows_by_codec = {row.codec: row for row in compare(rows, {"bf16": BF16(), "mxfp8": MXFP8()}, timed=False)}
    # Headers of 16 bytes: a rank of the ring sends 6 messages in 6 / 4 times its coordinates.
    headers = 8 * 6 * 16 / (6 / 4 * rows.shape[1])
    assert rows_by_codec["bf16"].bits == pytest.approx(16 + headers)
    assert rows_by_codec["mxfp8"].bits == pytest.approx(8.25 + headers)


def test_bias_of_codecs_without_random_numbers_is_all_of_their_error(random_rows):
    rows = random_rows(3, 5000)
    for row in compare(rows, {"mxfp8": MXFP8(), "omnireduce": OmniReduce()}, schedules=["ring", "direct"], timed=False):
        assert row.vnmse > 1e-4
        assert row.bias == pytest.approx(row.vnmse, rel=1e-9)
        assert row.nanoseconds is None


def test_bias_of_an_unbiased_codec_is_chance(random_rows):
    rows = random_rows(3, 200_000)
    (row,) = compare(rows, {"thc": THC(8, reach=5.0)}, repeats=3, timed=False)
    # Inner products of independent errors: 3 of them, each about vnmse / sqrt(d).
    assert row.bias < 6 * row.vnmse / math.sqrt(200_000)


def test_bias_is_found_under_noise():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, 100_000, generator=generator, dtype=torch.float64)
    estimates = list(0.9 * exact + 0.5 * noise)
    assert bias(estimates, exact) == pytest.approx(0.01, abs=0.004)
    assert bias(estimates[:1], exact) is None


def test_an_exact_codec_has_no_error_and_points_the_same_way(random_rows):
    rows = random_rows(2, 1000)
    (row,) = compare(rows, {"exact": Exact(torch.float64)}, repeats=1)
    assert row.vnmse < 1e-14
    assert row.cosine == pytest.approx(1.0, abs=1e-12)
    assert row.bias is None
    assert row.nanoseconds > 0


def test_cosine_of_known_angles():
    exact = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert cosine(torch.tensor([1.0, 1.0]), exact) == pytest.approx(math.sqrt(0.5))
    assert cosine(torch.tensor([-2.0, 0.0]), exact) == pytest.approx(-1.0)


@pytest.mark.parametrize(("rows", "repeats"), [(torch.ones(1, 5), 2), (torch.ones(5), 2), (torch.ones(2, 5), 0)])
def test_too_few_ranks_or_repeats_are_refused(rows, repeats):
    with pytest.raises(InputError):
        list(compare(rows, {"bf16": BF16()}, repeats=repeats))
