"""Every backend against the reference, bit by bit: statistics, messages, means and sums.

Outputs are poisoned before every operation, so that a byte or a coordinate that is not written shows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dynamiq_core import CodecConfig, DynamiQ, Received, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 255, 256, 257, 1000, 4097, 70001]
KINDS = [(scales, rounding) for scales in ("log", "linear") for rounding in ("dithered", "correlated", "independent")]
MOVED = ("mean", "rows", "scales_at", "nonzero", "energies", "errors")
"""Tensors of a plan."""

EXTREMES = [1e-45, 1e-38, 1e-36, 1e-30, 1e-6, 1e30, 4.3e37, 3e38]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scales", "rounding"), KINDS)
@pytest.mark.parametrize("width", range(1, 9))
def test_every_width_kind_and_dtype(subject, gradient, width, scales, rounding, dtype):
    subject.skip_if_slow(0 if dtype == torch.bfloat16 else 1000)
    config = CodecConfig(bits=width + 1, widths=(width,), scales=scales, rounding=rounding)
    numel = 300 if dtype == torch.bfloat16 else 1000
    plan = subject.check_step(config, [gradient(numel, seed, dtype) for seed in range(3)])
    assert (plan.width == width).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("config", [CodecConfig(), CodecConfig.paper()], ids=["default", "paper"])
def test_every_size(subject, gradient, config, numel, dtype):
    subject.skip_if_slow(numel)
    subject.check_step(config, [gradient(numel, seed, dtype) for seed in range(2)])


@pytest.mark.parametrize("workers", range(2, 9))
def test_every_number_of_workers_slot_and_chunk(subject, gradient, workers):
    subject.skip_if_slow(256 * workers)
    for config in (CodecConfig(seed=2**64 - 1), CodecConfig.paper()):
        gradients = [gradient(256 * workers + 300, seed) for seed in range(workers)]
        subject.check_step(config, gradients, chunks=workers, step=2**32 - 1, bucket=2**20)


@pytest.mark.parametrize("config", [CodecConfig(), CodecConfig.paper()], ids=["default", "paper"])
@pytest.mark.parametrize("count", [3, 6])
def test_many_messages_at_once(subject, gradient, config, count):
    """As an owner gets them in a direct exchange."""
    gradients = [gradient(600, seed) for seed in range(count + 1)]
    codec, reference = DynamiQ(config, operations=subject.operations), DynamiQ(config)
    merged = reference.merge_statistics([reference.statistics(x) for x in gradients])
    results = []
    for c, device in ((reference, torch.device("cpu")), (codec, subject.device)):
        plan = c.plan(merged, 600, device=device, workers=count + 1, chunks=1, step=5, bucket=3)
        there = [x.to(device) for x in gradients]
        received = [Received(c.compress(x, plan, chunk=0, slot=slot), slot) for slot, x in enumerate(there[1:], 1)]
        results.append(c.decompress_accumulate_recompress(received, there[0], plan, chunk=0, slot=0).cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize(("bits", "widths"), [(3.4, {0, 2, 3, 4, 5, 6, 7}), (4.5, {0, 3, 4, 5, 6, 7, 8})])
def test_all_widths_in_one_message(bits, widths, subject, gradient):
    subject.skip_if_slow(70001)
    plan = subject.check_step(CodecConfig(bits=bits), [gradient(70001, seed) for seed in range(4)], chunks=4)
    assert set(plan.width.unique().tolist()) == widths


def test_more_chunks_than_super_groups(subject, gradient):
    plan = subject.check_step(CodecConfig(), [gradient(300, seed) for seed in range(3)], chunks=3)
    assert plan.sizes[2] == 0


@pytest.mark.parametrize("bend", [1.0, 1.1, 2.0, 4.0])
def test_every_bend(subject, gradient, bend):
    subject.skip_if_slow(3000)
    subject.check_step(CodecConfig(bend=bend), [gradient(3000, seed) for seed in range(3)])


def test_without_the_mean(subject, gradient):
    subject.check_step(CodecConfig(subtract_mean=False), [gradient(500, seed) + 5 for seed in range(2)])


@pytest.mark.parametrize(("scales", "rounding"), KINDS)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_outliers(subject, gradient, extreme, scales, rounding):
    config = CodecConfig(scales=scales, rounding=rounding)
    gradients = [gradient(600, seed) for seed in range(2)]
    gradients[0][3] = extreme
    gradients[1][300] = -extreme
    subject.check_step(config, gradients)


@pytest.mark.parametrize(("scales", "rounding"), KINDS)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_magnitudes(subject, gradient, extreme, scales, rounding):
    config = CodecConfig(scales=scales, rounding=rounding)
    gradients = [(gradient(600, seed) / 40).clamp(-1, 1) * extreme for seed in range(2)]
    subject.check_step(config, gradients)


@pytest.mark.parametrize(("scales", "rounding"), KINDS)
def test_zeros(subject, gradient, scales, rounding):
    config = CodecConfig(scales=scales, rounding=rounding)
    subject.check_step(config, [torch.zeros(300), torch.zeros(300)])
    gradients = [gradient(300, seed) for seed in range(2)]
    for x in gradients:
        x[32:48] = 0.0  # a group
        x[48:64] = -0.0
        x[64:80] *= 1e-38  # a group too small to have a reciprocal
        x[100:111] = 0.0
    subject.check_step(config, gradients)


def test_roots_beside_the_middle_between_two_bfloat16(subject):
    """There the last bit of a float32 decides, which happens to a few super-groups in a million."""
    rows = []
    for total in ((16 * m + 8) ** 2 + unit for m in range(128, 256, 4) for unit in (-1, 1)):
        row = []
        while (left := total - sum(entry**2 for entry in row)) > 0:
            row.append(min(2047, math.isqrt(left)))
        rows.append(row + [0] * (256 - len(row)))
    x = torch.tensor(rows, dtype=torch.float32).flatten() / 1024
    found = subject.operations.statistics(x.to(subject.device)).cpu()
    assert torch.equal(found.view(torch.int16), reference.statistics(x).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(subject, gradient, bad, dtype):
    for config in (CodecConfig(), CodecConfig.paper()):
        gradients = [gradient(600, seed, dtype) for seed in range(3)]
        gradients[1][300] = bad
        subject.check_step(config, gradients)


@pytest.mark.parametrize(("scales", "rounding"), KINDS)
def test_partial_sums_that_overflow(subject, scales, rounding):
    config = CodecConfig(scales=scales, rounding=rounding, subtract_mean=False)
    signs = torch.where(torch.arange(512) % 3 > 0, 1.0, -1.0)
    gradients = [signs * 3e38, signs * 3.4e38, signs]
    for x in gradients:
        x[256:] *= 1e-30  # the super-group beside it is unharmed
    # The squares overflow, too: a plan made for smaller gradients is what meets such sums.
    codec = DynamiQ(config, operations=subject.operations)
    reference = DynamiQ(config)
    rows = reference.statistics(signs)
    message = None
    for slot, x in enumerate(gradients):
        results = []
        for c, device in ((codec, subject.device), (reference, torch.device("cpu"))):
            plan = c.plan(rows, 512, device=device, workers=3, chunks=1)
            received = [] if message is None else [(message.to(device), slot - 1)]
            results.append(c.decompress_accumulate_recompress(received, x.to(device), plan, chunk=0, slot=slot).cpu())
        assert torch.equal(*results)
        message = results[1]
    plan = reference.plan(rows, 512, device=torch.device("cpu"), workers=3, chunks=1)
    mean = reference.decompress(message, plan, chunk=0, slot=2, out=torch.empty(512))
    assert not mean[:256].isfinite().any()
    assert mean[256:].isfinite().all()


def test_every_float16_and_bfloat16(subject):
    """Conversions both ways, exhaustively: every finite value goes through statistics and comes back as a mean."""
    subject.skip_if_slow(2**16)
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        finite = torch.where(every.isfinite(), every, 0.0)
        for x in (every, finite, finite.flip(0)[: 2**16 - 5].contiguous()):
            subject.check_step(CodecConfig(bits=9.0, widths=(8,)), [x, x])


def test_rounding_to_narrow_dtypes_at_every_boundary(subject):
    """Means at, just below and just above the middle between neighbours, from subnormals to overflow."""
    subject.skip_if_slow(2**16)
    codec, reference = DynamiQ(CodecConfig(), operations=subject.operations), DynamiQ(CodecConfig())
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16).item()
        # Subnormals, the change to normal numbers, a sample of those, and the last ones before overflow.
        steps = torch.cat((torch.arange(40), torch.arange(1000, 1050), torch.arange(0, largest, 331)))
        steps = torch.cat((steps, largest - torch.arange(40))).to(torch.int16)
        middle = steps.view(dtype).to(torch.float32) / 2 + (steps + 1).view(dtype).to(torch.float32) / 2
        middle[-40] = torch.finfo(dtype).max + (torch.finfo(dtype).max - middle[-39])  # half a unit above the largest
        for towards in (middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(torch.inf))):
            # A constant super-group of zero energy: its mean is added back exactly, and is all there is.
            values = torch.cat((towards, -towards))
            numel = 256 * len(values)
            results = []
            for c, device in ((codec, subject.device), (reference, torch.device("cpu"))):
                rows = torch.zeros(len(values), 2, dtype=torch.bfloat16)
                plan = c.plan(rows, numel, device=device, workers=1, chunks=1)
                plan.subtracted.copy_(values[plan.index.cpu().long()])
                message = torch.zeros(plan.sizes[0], dtype=torch.uint8, device=device)
                out = torch.empty(numel, dtype=dtype, device=device)
                results.append(c.decompress(message, plan, chunk=0, slot=0, out=out)[::256].cpu())
            assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
            largest = torch.finfo(dtype).max
            assert torch.equal(results[0], values.clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["log", "linear"])
def test_finite_means_near_the_largest_number_stay_finite_and_others_do_not(subject, scales, dtype):
    """A gradient scaler skips a step if it meets an infinity: it must see every true one and no other."""
    largest = min(torch.finfo(dtype).max, 2.0**124)  # of larger sums nothing is promised
    x = torch.full((600,), largest, dtype=dtype)
    x[::3] *= -1
    x[256:512] = largest  # a mean, which bfloat16 rounds up
    config = CodecConfig(scales=scales, bits=2.5)
    codec, reference = DynamiQ(config, operations=subject.operations), DynamiQ(config)
    for bad in (None, float("inf"), float("nan")):
        gradients = [x.clone(), x.clone()]
        if bad is not None:
            gradients[0][3] = bad
        plan = subject.check_step(config, gradients)
        mean, there = torch.empty(600, dtype=dtype), torch.empty(600, dtype=dtype, device=subject.device)
        message = reference.compress(gradients[0], plan, chunk=0, slot=0)
        reference.decompress(message, plan, chunk=0, slot=0, out=mean)
        assert mean[256:].isfinite().all()
        assert mean[:256].isfinite().all() == (bad is None)
        if bad is None and dtype == torch.float16:
            assert (mean == largest).any()
        # A sum that overflowed on the way, under a plan that knows of no infinity.
        plan = plan_with_a_clean_mean(plan)
        broken = gradients[0].float().clone()
        broken[:256] = float("inf")
        message = reference.compress(broken, plan, chunk=0, slot=0)
        reference.decompress(message, plan, chunk=0, slot=0, out=mean)
        moved = replace(plan, **{name: getattr(plan, name).to(subject.device) for name in MOVED})
        codec.decompress(message.to(subject.device), moved, chunk=0, slot=0, out=there)
        torch.testing.assert_close(there.cpu(), mean, rtol=0, atol=0, equal_nan=True)
        assert not mean[:256].isfinite().any()
        assert mean[256:].isfinite().all()


def plan_with_a_clean_mean(plan):
    """The plan with widths of 4 for all super-groups and no mean."""
    width = torch.full_like(plan.width, 4)
    offset = 128 * torch.arange(width.shape[1], dtype=torch.int32).expand_as(width)
    rows = torch.stack((plan.index, width, offset, torch.zeros_like(width)), dim=2)
    number = torch.full_like(plan.nonzero, width.shape[1])
    room = (1000,)
    return replace(plan, rows=rows, scales_at=128 * number, nonzero=number, sizes=room)
