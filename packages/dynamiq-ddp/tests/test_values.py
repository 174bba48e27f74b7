"""What the all-reduce computes: the mean, once, with the same bits on every rank, whatever the values."""

import threading

import pytest
import torch

from dynamiq_core import CodecConfig, DynamiQ, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import ReplicaError, all_reduce, simulate

SCHEDULES = ("ring", "butterfly", "direct")
RANKS = (1, 2, 3, 4, 5, 8)


def error(result, rows):
    return float((result.mean.double() - rows.double().mean(dim=0)).norm())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_of_any_size_and_dtype_on_any_number_of_ranks(dtype, n, schedule, codec, random_rows, tolerance):
    for d in (1, 2, 7, 255, 256, 257, 1000):
        rows = random_rows(n, d, seed=d, dtype=dtype)
        result = simulate(rows, codec=codec, schedule=schedule)
        assert result.mean.shape == (d,)
        assert result.mean.dtype == dtype
        assert error(result, rows) <= tolerance(codec, rows, schedule), d


@pytest.mark.parametrize(
    ("schedule", "dtype"), list(zip(SCHEDULES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
)
@pytest.mark.parametrize("n", RANKS)
def test_a_million_coordinates(n, schedule, dtype, codec, random_rows, tolerance):
    rows = random_rows(n, 10**6, dtype=dtype)
    result = simulate(rows, codec=codec, schedule=schedule)
    assert error(result, rows) <= tolerance(codec, rows, schedule)
    if n > 1:  # a codec that sends everything exactly would hide faults of the bookkeeping
        assert error(result, rows) > 0


def test_averages_once():
    assert simulate(torch.tensor([[1.0], [3.0]]), codec=BF16()).mean.item() == 2.0
    assert simulate(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), codec=BF16()).mean.item() == 2.5


def test_averages_values_and_not_codes(codec, tolerance):
    rows = torch.tensor([1.0, 2.0, 3.0, 250.0]).expand(4, 4).contiguous()
    assert error(simulate(rows, codec=codec), rows) <= tolerance(codec, rows)


def test_integers_pass_exactly_through_bf16():
    rows = torch.randint(-8, 9, (4, 1001), generator=torch.Generator().manual_seed(0)).float()
    for schedule in SCHEDULES:
        assert torch.equal(simulate(rows, codec=BF16(), schedule=schedule).mean, rows.mean(dim=0))


@pytest.mark.parametrize("n", RANKS[1:])
def test_ranks_whose_bit_widths_would_differ_locally(n, codec, tolerance):
    rows = torch.zeros(n, 1000)
    rows[1, 300] = 1e6
    result = simulate(rows, codec=codec)
    assert error(result, rows) <= tolerance(codec, rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", RANKS)
def test_zeros_stay_zeros(n, schedule, codec):
    rows = torch.zeros(n, 1000)
    assert not simulate(rows, codec=codec, schedule=schedule).mean.any()
    rows[:, 512:768] = torch.randn(n, 256, generator=torch.Generator().manual_seed(0))
    mean = simulate(rows, codec=codec, schedule=schedule).mean
    assert not mean[:512].any()
    assert not mean[768:].any()
    assert mean[512:768].any()


def test_subnormal_values_are_harmless(codec):
    mean = simulate(torch.full((3, 600), 1e-38), codec=codec).mean
    assert ((mean >= 0) & (mean <= 2e-38)).all()  # they may be rounded to zero


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("value", [1.0, 1e-30, 1e30, -0.125])
def test_constants_of_any_magnitude(value, n, codec):
    mean = simulate(torch.full((n, 600), value), codec=codec).mean
    assert mean.isfinite().all()
    assert ((mean - value).abs() <= abs(value) / 2).all()
    assert abs(float(mean.double().mean()) / value - 1) < 0.02


def test_sum_beyond_float16_is_no_overflow(codec):
    mean = simulate(torch.full((2, 300), 60000.0, dtype=torch.float16), codec=codec).mean
    assert ((mean.double() - 60000).abs() <= 60000 * 0.01).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("n", RANKS)
def test_a_value_that_is_not_finite_is_seen_by_all_and_harms_no_other_super_group(n, value, codec, random_rows):
    rows = random_rows(n, 2000)
    rows[n - 1, 700] = value  # in the super-group from 512 to 767
    mean = simulate(rows, codec=codec).mean
    assert not mean[700].isfinite()
    assert mean[:512].isfinite().all()
    assert mean[768:].isfinite().all()


def test_the_call_after_a_nan_is_clean(ranks, codec, random_rows, same_bits):
    rows = random_rows(3, 600)

    def two_calls(transport):
        spoiled = torch.full((600,), torch.nan)
        all_reduce(spoiled, transport=transport, codec=codec, step=0)
        return all_reduce(rows[transport.rank].clone(), transport=transport, codec=codec, step=1)

    for result in ranks(3, two_calls):
        assert same_bits(result, simulate(rows, codec=codec, step=1).mean)


def test_reproducible_and_keyed_by_step_and_bucket(random_rows, same_bits):
    rows, codec = random_rows(3, 1000), DynamiQ()
    first = simulate(rows, codec=codec, step=5, bucket=2).mean
    assert same_bits(first, simulate(rows, codec=codec, step=5, bucket=2).mean)
    assert not same_bits(first, simulate(rows, codec=codec, step=6, bucket=2).mean)
    assert not same_bits(first, simulate(rows, codec=codec, step=5, bucket=3).mean)
    assert not same_bits(first, simulate(rows, codec=DynamiQ(CodecConfig(seed=1)), step=5, bucket=2).mean)


def test_global_generators_are_untouched(codec, random_rows):
    rows = random_rows(2, 300)
    state = torch.random.get_rng_state()
    simulate(rows, codec=codec)
    assert torch.equal(state, torch.random.get_rng_state())


def test_simulate_leaves_the_gradients_alone(codec, random_rows):
    rows = random_rows(3, 300)
    before = rows.clone()
    result = simulate(rows, codec=codec)
    assert torch.equal(rows, before)
    assert result.bytes_sent.dtype == torch.int64
    assert result.bytes_sent.shape == (3,)
    exact = rows.double().mean(dim=0)
    assert result.vnmse == pytest.approx(float((result.mean - exact).square().sum() / exact.square().sum()), rel=1e-9)


def test_simulate_sees_ranks_that_end_differently(random_rows):
    class Crooked(BF16):
        def decompress(self, message, plan, *, chunk, slot, out):
            super().decompress(message, plan, chunk=chunk, slot=slot, out=out)
            out[0] += threading.get_ident() % 1000  # another thread, another rank
            return out

    with pytest.raises(ReplicaError, match="other bits than rank 0"):
        simulate(random_rows(3, 10), codec=Crooked())


@pytest.mark.parametrize(
    "bad", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(0, 3), torch.ones(3, 0), torch.ones(2, 3).double(), [[1.0]]]
)
def test_simulate_refuses_what_is_no_matrix_of_gradients(bad):
    with pytest.raises(InputError, match=r"gradients cannot be .*allowed"):
        simulate(bad, codec=BF16())
