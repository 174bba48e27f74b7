from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, Received, vnmse
from dynamiq_core.wire import OVERHEAD

SIZES = (1, 2, 7, 255, 256, 257, 1000, 100_000)
WORKERS = (1, 2, 3, 4, 5, 8)
CONFIGS = {
    "default": CodecConfig(),
    "paper": CodecConfig.paper(),
    "independent": CodecConfig(rounding="independent"),
    "linear": CodecConfig(scales="linear", bits=3.7),
}
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of a dtype's own rounding."""

LARGE = {(1, torch.float16), (2, torch.bfloat16), (3, torch.float32), (8, torch.float32)}
"""Which workers and dtypes get the largest tensor; every one would take minutes."""


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def codec(request: pytest.FixtureRequest) -> DynamiQ:
    return DynamiQ(request.param)


def exact_mean(gradients: list[Tensor]) -> Tensor:
    return torch.stack(gradients).double().mean(dim=0)


def squared_bound(reduced: Any, exact: Tensor, dtype: torch.dtype) -> float:
    """Expected squared error of the mean with six sigma of room for few coordinates, and the rounding of the output."""
    n, d = reduced.plan.workers, len(exact)
    expected = reduced.plan.expected_error.item() / n**2
    return expected * (1.5 + 6 * (2 / d) ** 0.5) + 4 * ROUNDING[dtype] ** 2 * exact.square().sum().item()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("workers", WORKERS)
def test_error_is_as_expected_at_every_size(workers: int, dtype: torch.dtype, ring, normal) -> None:
    for numel in SIZES:
        if numel > 1000 and (workers, dtype) not in LARGE:
            continue
        gradients = [normal(100 * i + numel, numel).to(dtype) for i in range(workers)]
        before = [x.clone() for x in gradients]
        reduced = ring(gradients, DynamiQ())
        assert reduced.mean.dtype == dtype
        exact = exact_mean(gradients)
        error = (reduced.mean.double() - exact).square().sum().item()
        assert error <= squared_bound(reduced, exact, dtype), numel
        assert all(torch.equal(x, y) for x, y in zip(gradients, before, strict=True))


@pytest.mark.parametrize(("bits", "workers"), [(2, 1), (2, 4), (3.7, 2), (5, 1), (5, 4), (5, 8), (8, 1), (8, 4)])
def test_predicted_error_of_normal_gradients(bits: float, workers: int, ring, normal) -> None:
    """Within 5 % of what is measured on a ring, with and without subtracted dither."""
    gradients = list(normal(int(bits * 10), workers, 16_384))
    exact = exact_mean(gradients)
    for rounding in ("dithered", "independent"):
        reduced = ring(gradients, DynamiQ(CodecConfig(bits=bits, rounding=rounding)))
        predicted = reduced.plan.expected_error.item() / workers**2
        error = (reduced.mean.double() - exact).square().sum().item()
        assert error == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(("width", "workers"), [(2, 16), (2, 32), (3, 64), (4, 64)])
def test_predicted_error_of_a_long_ring(width: int, workers: int, ring, normal) -> None:
    """Errors feed on one another: by a factor of 18 for two bits at 32 ranks."""
    gradients = list(normal(width, workers, 8192))
    reduced = ring(gradients, DynamiQ(CodecConfig(widths=(width,), bits=width + 1)), chunks=1)
    predicted = reduced.plan.expected_error.item() / workers**2
    error = (reduced.mean.double() - exact_mean(gradients)).square().sum().item()
    assert error == pytest.approx(predicted, rel=0.12)


def test_vnmse_at_five_bits(ring, direct, normal) -> None:
    """Independent normal gradients of one magnitude, the hardest case: measured 1.25e-2 and 0.87e-2."""
    gradients = list(normal(0, 4, 16_384))
    exact = exact_mean(gradients)
    assert vnmse(ring(gradients, DynamiQ()).mean, exact) < 1.4e-2
    assert vnmse(direct(gradients, DynamiQ()).mean, exact) < 1.0e-2


@pytest.mark.parametrize("workers", [1, 4])
def test_more_bits_less_error(workers: int, ring, normal) -> None:
    loudness = torch.exp2(2 * normal(1, 24)).repeat_interleave(256)
    gradients = [normal(i, 24 * 256) * loudness for i in range(workers)]
    errors = [vnmse(ring(gradients, DynamiQ(CodecConfig(bits=b))).mean, exact_mean(gradients)) for b in range(1, 10)]
    # From 3 bits on nothing that has energy is dropped, which costs what the third bit would save, and more.
    assert errors[0] > errors[1]
    assert errors[2:] == sorted(errors[2:], reverse=True)
    assert errors[1] < 0.5
    assert errors[8] < 1e-4


def test_the_tolerance_trades_the_squared_error_for_the_least_super_groups(ring, normal) -> None:
    """Energies over 22 octaves: no super-group loses more than the tolerance; with a tolerance of 1, some lose all."""
    loudness = torch.exp2(-11 * torch.rand(400, generator=torch.Generator().manual_seed(9))).repeat_interleave(256)
    gradients = [normal(i, 400 * 256) * loudness for i in range(4)]
    exact = exact_mean(gradients)
    even, alone = (ring(gradients, DynamiQ(CodecConfig(tolerance=t))).mean for t in (1 / 16, 1.0))
    energy = exact.view(400, 256).square().sum(1)
    lost = [(mean - exact).view(400, 256).square().sum(1) / energy for mean in (even, alone)]
    assert lost[0].max() < 1 / 16
    assert (lost[1] == 1).sum() > 20
    assert 4 * vnmse(alone, exact) < vnmse(even, exact)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_zeros_come_back_as_zeros(dtype: torch.dtype, codec: DynamiQ, all_reduce) -> None:
    for numel in (1, 7, 256, 257, 5000):
        assert (all_reduce([torch.zeros(numel, dtype=dtype)] * 3, codec).mean == 0).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_constants(dtype: torch.dtype, codec: DynamiQ, ring) -> None:
    values = [1.0, -3.0, 0.1, 2.0**-14, 60000.0] + ([1e-30, 1e30] if dtype != torch.float16 else [])
    for value in values:
        constant = torch.full((300,), value, dtype=dtype)
        mean = ring([constant] * 3, codec).mean
        # What bfloat16 rounds off the mean is quantised; its share is at most 2**-8.
        assert (mean.double() - constant.double()).abs().max() <= 2.0**-7 * abs(value)


def test_the_mean_of_few_numbers(codec: DynamiQ, all_reduce) -> None:
    """Fewer coordinates than ranks: some chunks are empty."""
    gradients = [torch.tensor([float(i)]) for i in (1, 2, 3, 4)]
    reduced = all_reduce(gradients, codec)
    assert reduced.plan.sizes[1:] == (0, 0, 0)
    assert reduced.mean.item() == pytest.approx(2.5, abs=0.1)
    # Division by the number of workers comes after decoding, not on codes.
    same = torch.tensor([1.0, 2.0, 3.0, 250.0])
    error = all_reduce([same] * 4, codec).mean - same
    assert error.abs().max() < 250 * 0.15


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30])
def test_any_magnitude(magnitude: float, codec: DynamiQ, ring, normal) -> None:
    gradients = [x * magnitude for x in normal(0, 3, 5000)]
    reduced = ring(gradients, codec)
    assert torch.isfinite(reduced.mean).all()
    if magnitude > 1e-36:
        expected = reduced.plan.expected_error.item() / 9
        assert vnmse(reduced.mean, exact_mean(gradients)) < 1.5 * expected / exact_mean(gradients).square().sum()
    else:  # too small for a reciprocal: zeros, or a mean
        assert reduced.mean.abs().max() <= 4 * magnitude


@pytest.mark.parametrize(
    ("numel", "own", "rest"),
    # In a chunk of eight super-groups, the others' least widths leave it 6 bits instead of 8, and they have few more.
    [(24_000, 1e-3, 0.1), (6000, 4e-3, 0.3)],
)
def test_one_outlier_harms_only_its_own_super_group(
    codec: DynamiQ, numel: int, own: float, rest: float, ring, normal
) -> None:
    gradients = list(normal(0, 3, numel))
    gradients[1][1300] = 1e6
    reduced, exact = ring(gradients, codec), exact_mean(gradients)
    assert vnmse(reduced.mean, exact) < own
    others = torch.arange(numel) // 256 != 1300 // 256
    assert vnmse(reduced.mean[others], exact[others]) < rest  # the budget of the others is what it was


def test_differing_ranks(codec: DynamiQ, all_reduce, normal) -> None:
    """Zeros on one rank and an outlier on the other: what a rank sees alone decides nothing."""
    outlier = 0.01 * normal(0, 1000)
    outlier[3] = 1e6
    reduced = all_reduce([torch.zeros(1000), outlier], codec)
    assert reduced.mean[3].item() == pytest.approx(5e5, rel=0.05)
    assert reduced.mean[256:].abs().max() < 0.1


def test_zero_groups_and_untouched_rows_stay_exactly_zero(codec: DynamiQ, all_reduce, normal) -> None:
    """As in the gradient of an embedding: whole rows that no worker touched, within super-groups and across them."""
    keep = torch.ones(8_000, dtype=torch.bool)
    keep[1024:2048] = keep[5120:5136] = keep[7000:7048] = keep[7_936:] = False
    gradients = [torch.where(keep, x, 0.0) for x in normal(0, 3, 8_000)]
    reduced = all_reduce(gradients, codec)
    zero = ~keep
    zero[7000:7008] = zero[7040:7048] = False  # groups of 16 begin at 6992, 7008, 7024 and 7040
    assert (reduced.mean[zero] == 0).all()
    assert vnmse(reduced.mean, exact_mean(gradients)) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_come_out_non_finite_and_harm_nothing_else(
    bad: float, codec: DynamiQ, all_reduce, normal
) -> None:
    gradients = [normal(i, 3000) for i in range(3)]
    for x in gradients:
        x[512:768] = 0
    clean = all_reduce(gradients, codec)
    gradients[1][600] = bad
    reduced = all_reduce(gradients, codec)
    assert not torch.isfinite(reduced.mean[512:768]).any()
    others = torch.arange(3000) // 256 != 2
    assert torch.equal(reduced.mean[others], clean.mean[others])
    again = all_reduce([torch.where(torch.isfinite(x), x, 0.0) for x in gradients], codec)
    assert torch.equal(again.mean, clean.mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_non_finite_in_half_precision(dtype: torch.dtype, codec: DynamiQ, ring, normal) -> None:
    gradients = [normal(i, 600).to(dtype) for i in range(2)]
    gradients[0][599] = math.inf
    mean = ring(gradients, codec).mean
    assert not torch.isfinite(mean[512:]).any()
    assert torch.isfinite(mean[:512]).all()


def test_a_sum_that_overflows_on_the_way_is_seen_by_all(codec: DynamiQ, all_reduce) -> None:
    """Gradients of 3e38 on four workers: their float32 sum is infinite, and silence would be wrong."""
    signs = torch.where(torch.arange(512) % 3 == 0, 1.0, -1.0)
    large = [3e38 * signs] * 4
    assert not torch.isfinite(all_reduce(large, codec).mean).any()


def test_half_precision_sums_do_not_overflow(codec: DynamiQ, ring) -> None:
    """Two gradients of 60000 have a sum that float16 cannot hold, and a mean that it can."""
    x = torch.full((512,), 60000.0, dtype=torch.float16)
    mean = ring([x, x], codec).mean
    assert torch.isfinite(mean).all()
    assert (mean.float() - 60000).abs().max() <= 60000 * 2**-7


@pytest.mark.parametrize("numel", [1, 255, 257, 1000])
def test_padding_never_leaks(numel: int, codec: DynamiQ, plan_of, normal) -> None:
    """Gradient, messages and result lie inside larger buffers full of poison, at odd places."""
    poison = 1234.5
    gradients = []
    for seed in range(2):
        buffer = torch.full((numel + 600,), math.nan)
        buffer[7 : 7 + numel] = normal(seed, numel)
        buffer[6 + numel] = 40.0
        gradients.append(buffer[7 : 7 + numel])
    clean = [x.clone() for x in gradients]
    plan = plan_of(gradients, codec)
    results = []
    for xs in (gradients, clean):
        out = torch.full((numel + 600,), poison)
        for chunk, size in enumerate(plan.sizes):
            received: list[Received] = []
            for slot, x in enumerate(xs):
                room = torch.full((size + 64,), 0xEE, dtype=torch.uint8)
                codec.decompress_accumulate_recompress(
                    received, x, plan, chunk=chunk, slot=slot, out=room[3 : 3 + size]
                )
                assert (room[:3] == 0xEE).all()
                assert (room[3 + size :] == 0xEE).all()
                received = [Received(room[3 : 3 + size].clone(), slot)]
            codec.decompress(received[0].message, plan, chunk=chunk, slot=1, out=out[9 : 9 + numel])
        assert (out[:9] == poison).all()
        assert (out[9 + numel :] == poison).all()
        results.append(out[9 : 9 + numel])
    assert torch.equal(*results)
    assert (results[0] != poison).all()
    assert results[0][-1].item() == pytest.approx(40, abs=6)  # the last real coordinate is not written by the padding


def test_a_chunk_writes_its_own_coordinates_and_no_other(codec: DynamiQ, plan_of, normal) -> None:
    x = normal(0, 2500)
    plan = plan_of([x], codec, chunks=3)
    for chunk in range(3):
        message = codec.compress(x, plan, chunk=chunk, slot=0)
        out = codec.decompress(message, plan, chunk=chunk, slot=0, out=torch.full((2500,), math.nan))
        mine = plan.index[chunk, : plan.lengths[chunk]].long()
        written = torch.isin(torch.arange(2500) // 256, mine)
        assert torch.isfinite(out[written]).all()
        assert out[~written].isnan().all()
        total = codec.decompress_accumulate(message, torch.full((2500,), 5.0), plan, chunk=chunk, slot=0)
        assert (total[~written] == 5).all()
        torch.testing.assert_close(total[written] - 5 + 0 * out[written], out[written], rtol=0, atol=1e-5)


def test_messages_do_not_depend_on_what_was_in_the_buffer(codec: DynamiQ, plan_of, normal) -> None:
    x = normal(0, 3000)
    plan = plan_of([x], codec, chunks=2)
    for chunk in range(2):
        fresh = codec.compress(x, plan, chunk=chunk, slot=0)
        dirty = torch.full_like(fresh, 0xFF)
        assert codec.compress(x, plan, chunk=chunk, slot=0, out=dirty) is dirty
        assert torch.equal(dirty, fresh)


def test_a_hop_is_decode_add_encode(plan_of, normal) -> None:
    """Fused or in steps, with several messages in the order given, the bytes are the same."""
    codec = DynamiQ(CodecConfig(subtract_mean=False))
    gradients = [normal(i, 2000) for i in range(3)]
    plan = plan_of(gradients, codec, chunks=1)
    first, second = (Received(codec.compress(gradients[i], plan, chunk=0, slot=i), i) for i in (0, 1))
    fused = codec.decompress_accumulate_recompress([first, second], gradients[2], plan, chunk=0, slot=2)
    total = gradients[2].clone()
    for message, slot in (first, second):
        codec.decompress_accumulate(message, total, plan, chunk=0, slot=slot)
    assert torch.equal(codec.compress(total, plan, chunk=0, slot=2), fused)


@pytest.mark.parametrize("name", CONFIGS)
def test_reproducible_from_seed_step_and_bucket(name: str, plan_of, normal) -> None:
    x = normal(0, 3000)

    def message(seed: int = 1, step: int = 0, bucket: int = 0, slot: int = 0) -> Tensor:
        codec = DynamiQ(CONFIGS[name].replace(seed=seed))
        return codec.compress(x, plan_of([x, x], codec, step=step, bucket=bucket), chunk=0, slot=slot)

    base = message()
    assert torch.equal(message(), base)
    for other in (message(seed=2), message(seed=1 + 2**32), message(step=1), message(bucket=1), message(slot=1)):
        assert not torch.equal(other, base)


def test_the_sender_of_a_dithered_message_must_be_named(plan_of, normal) -> None:
    """The receiver subtracts the dither of the slot that it is told; the wrong one costs accuracy."""
    codec, x = DynamiQ(CodecConfig(bits=4)), normal(0, 5000)
    plan = plan_of([x, x], codec, chunks=1)
    message = codec.compress(x, plan, chunk=0, slot=0)
    right, wrong = (
        codec.decompress_accumulate(message, torch.zeros(5000), plan, chunk=0, slot=slot) for slot in (0, 1)
    )
    assert vnmse(wrong, x) > 2 * vnmse(right, x)


def test_no_global_generator_is_touched(codec: DynamiQ, all_reduce, normal) -> None:
    gradients = list(normal(0, 2, 1000))
    before = torch.get_rng_state()
    all_reduce(gradients, codec)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_that_require_grad_are_read_like_any_other(ring, normal) -> None:
    gradients = list(normal(0, 2, 1000))
    expected = ring(gradients, DynamiQ()).mean
    attached = ring([x.clone().requires_grad_() for x in gradients], DynamiQ()).mean
    assert torch.equal(attached, expected)
    assert not attached.requires_grad


@pytest.mark.parametrize("bits", [1, 2, 3.7, 5, 9])
@pytest.mark.parametrize("scales", ["log", "linear"])
def test_what_travels_stays_within_the_budget(bits: float, scales: Any, plan_of, normal) -> None:
    """Counted on real tensors: one direction of every chunk, the statistics, and the room left for framing."""
    codec = DynamiQ(CodecConfig(bits=bits, scales=scales))
    gradients = list(normal(0, 4, 10_000))
    plan = plan_of(gradients, codec)
    messages = [codec.compress(gradients[0], plan, chunk=c, slot=0) for c in range(4)]
    statistics = codec.statistics(gradients[0])
    sent = sum(m.numel() for m in messages) + statistics.numel() * statistics.element_size() + 4 * OVERHEAD
    assert sent <= bits * 10_000 / 8
    assert [m.numel() for m in messages] == list(plan.sizes)
