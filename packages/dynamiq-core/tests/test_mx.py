"""Microscaling formats against torchao's casts, torch's own float8, and the specification in exact arithmetic."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dynamiq_core import ConfigError, Received
from dynamiq_core.baselines import MXFP4, MXFP6, MXFP8
from dynamiq_core.baselines.mx import ELEMENTS, cast, uncast

CODECS = {
    "e4m3": MXFP8("e4m3"),
    "e5m2": MXFP8("e5m2"),
    "e2m3": MXFP6("e2m3"),
    "e3m2": MXFP6("e3m2"),
    "e2m1": MXFP4("e2m1"),
}
EXPECTED = json.loads((Path(__file__).parent / "data" / "mx_expected.json").read_text())


def from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@pytest.mark.parametrize("name", ELEMENTS)
def test_casts_have_the_bits_of_torchao(name):
    """The table is made by ``tests/programs/mx_expected.py``."""
    values = torch.stack([from_hex(row).view(torch.float32) for row in EXPECTED["values"]])
    codes, scales = cast(values, ELEMENTS[name])
    for row, expected in enumerate(EXPECTED[name]):
        scale, elements = (from_hex(part) for part in expected.split())
        assert scales[row] == scale[0], row
        if scale[0] != 255:  # in a block without a scale, elements mean nothing
            assert torch.equal(codes[row].to(torch.uint8), elements), row
    assert sum(expected.startswith("ff") for expected in EXPECTED[name]) == 1


@pytest.mark.parametrize("name", ["e2m3", "e3m2", "e2m1"])
def test_elements_are_the_nearest_numbers_and_ties_are_even(name):
    """In exact arithmetic, over all numbers of the format, the middles between them, and what lies beside those."""
    element = ELEMENTS[name]
    numbers = sorted({Fraction(number) for number in element.values()})
    assert (len(numbers), max(numbers)) == (2**element.width - 1, element.largest)
    middles = [(a + b) / 2 for a, b in pairwise(numbers)]
    beside = [middle * (1 + sign * Fraction(1, 2**20)) for middle in middles for sign in (-1, 1)]
    values = torch.tensor([float(value) for value in (*numbers, *middles, *beside)])
    codes = element.encode(values)
    found = element.decode(codes)
    assert torch.equal(torch.signbit(found), torch.signbit(values))
    for value, code, number in zip(values.tolist(), codes.tolist(), found.tolist(), strict=True):
        distances = [abs(Fraction(value) - candidate) for candidate in numbers]
        assert abs(Fraction(value) - Fraction(number)) == min(distances)
        assert distances.count(min(distances)) == 1 or code % 2 == 0, value


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_tables_are_those_of_torch(name):
    """The general arithmetic of `Element`, without torch's type, gives torch's numbers."""
    element = ELEMENTS[name]
    general = element._replace(dtype=None)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(element.dtype).to(torch.float32)
    usable = numbers.abs() <= element.largest
    assert torch.equal(general.decode(codes.long())[usable], numbers[usable])
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.equal(general.encode(values), values.to(element.dtype).view(torch.uint8).to(torch.int32))


@pytest.mark.parametrize("name", ELEMENTS)
def test_scale_is_the_power_of_two_that_the_specification_names(name):
    element = ELEMENTS[name]
    exponents = range(element.greatest - 126, 128)
    largest = torch.tensor([1.5 * 2.0**k for k in exponents])
    values = torch.cat((largest[:, None], torch.zeros(len(largest), 31)), dim=1)
    codes, scales = cast(values, element)
    assert scales.tolist() == [k - element.greatest + 127 for k in exponents]
    assert torch.equal(uncast(codes, scales, element), values)


@pytest.mark.parametrize("name", ELEMENTS)
def test_smallest_numbers_use_the_smallest_scale(name):
    element = ELEMENTS[name]
    values = torch.full((1, 32), 2.0**-126)
    values[0, 1:] = 0
    codes, scales = cast(values, element)
    assert scales.tolist() == [0]
    assert torch.equal(uncast(codes, scales, element), values)
    codes, scales = cast(torch.full((1, 32), 1e-45), element)
    assert scales.tolist() == [0]
    assert uncast(codes, scales, element).abs().max() <= 1e-45


def test_beyond_the_largest_element_values_saturate():
    values = torch.zeros(2, 32)
    values[:, 0] = torch.tensor([1.999, -1.999])
    for name, largest in {"e4m3": 1.75, "e5m2": 1.75, "e2m3": 1.875, "e3m2": 1.75, "e2m1": 1.5}.items():
        decoded = uncast(*cast(values, ELEMENTS[name]), ELEMENTS[name])
        assert decoded[:, 0].tolist() == [largest, -largest]


@pytest.mark.parametrize("name", CODECS)
def test_bits_on_the_wire_are_those_of_the_format(name):
    codec = CODECS[name]
    plan = codec.plan(None, 32 * 600, device=torch.device("cpu"), workers=3, chunks=3)
    assert plan.sizes == (200 * (4 * ELEMENTS[name].width + 1),) * 3
    assert 8 * sum(plan.sizes) / (32 * 600) == ELEMENTS[name].width + 0.25


@pytest.mark.parametrize("name", CODECS)
def test_hop_adds_in_float32_and_casts_once(name, normal):
    codec, element = CODECS[name], ELEMENTS[name]
    x, y, z = normal(3, 3, 64)
    plan = codec.plan(None, 64, device=x.device, workers=3, chunks=1)
    first, second = (codec.compress(v, plan, chunk=0, slot=0) for v in (x, y))
    out = torch.full((plan.sizes[0],), 255, dtype=torch.uint8)
    received = [Received(first, 0), Received(second, 1)]
    last = codec.decompress_accumulate_recompress(received, z, plan, chunk=0, slot=2, out=out)
    assert last is out
    total = z.view(2, 32)
    for value in (x, y):
        total = total + uncast(*cast(value.view(2, 32), element), element)
    mean = codec.decompress(last, plan, chunk=0, slot=2, out=torch.full((64,), torch.nan))
    assert torch.equal(mean, (uncast(*cast(total, element), element) / 3).flatten())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_block_and_no_other(name, bad, normal, all_reduce):
    rows = [*normal(4, 3, 100)]
    clean = all_reduce(rows, CODECS[name]).mean
    rows[1][40] = bad
    mean = all_reduce(rows, CODECS[name]).mean
    assert mean[32:64].isnan().all()
    assert torch.equal(mean[:32], clean[:32])
    assert torch.equal(mean[64:], clean[64:])


def test_a_sum_that_overflows_is_not_finite(all_reduce):
    rows = [torch.full((32,), 3e38), torch.full((32,), 3e38)]
    assert all_reduce(rows, MXFP8()).mean.isnan().all()


@pytest.mark.parametrize(("make", "bad"), [(MXFP8, "e2m1"), (MXFP6, "e4m3"), (MXFP4, "e3m0"), (MXFP8, None)])
def test_other_elements_are_refused(make, bad):
    with pytest.raises(ConfigError, match=r"element of MXFP\d must be one of"):
        make(bad)
