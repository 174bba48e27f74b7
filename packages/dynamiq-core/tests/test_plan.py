from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan
from dynamiq_core.allocation import chained_errors, cost, hull
from dynamiq_core.config import GROUPS
from dynamiq_core.plan import MEAN_SHARE
from dynamiq_core.statistics import squared_norms
from dynamiq_core.wire import chunk_lengths, message_sizes

CPU = torch.device("cpu")
TENSORS = ("mean", "rows", "scales_at", "nonzero", "expected_error")


def assert_same(a: DynamiQPlan, b: DynamiQPlan, names: tuple[str, ...] = TENSORS) -> None:
    for name in names:
        assert torch.equal(getattr(a, name).nan_to_num(7.0), getattr(b, name).nan_to_num(7.0)), name


def with_mean_of(other: DynamiQPlan, plan: DynamiQPlan) -> DynamiQPlan:
    """``plan`` with the means of another plan for the same tensor."""
    rows = plan.rows.clone()
    rows[..., 3] = torch.where(plan.index >= 0, other.mean.view(torch.int32)[plan.index.long()], 0)
    return replace(plan, mean=other.mean, rows=rows)


def mixed(normal: Any, seed: int, numel: int) -> Tensor:
    """A gradient whose super-groups differ in magnitude."""
    loudness = torch.exp2(2 * normal(seed + 1, -(-numel // 256)))
    return normal(seed, numel) * loudness.repeat_interleave(256)[:numel]


def assert_consistent(plan: DynamiQPlan) -> None:
    """Everything that follows from index and width, written as loops; no message is ever too small."""
    config, chunks = plan.config, len(plan.sizes)
    assert plan.sizes == message_sizes(config, plan.numel, chunks)
    assert plan.lengths == chunk_lengths(plan.numel, chunks)
    dealt = plan.index.T.flatten()
    total = -(-plan.numel // 256)
    assert sorted(dealt[:total].tolist()) == list(range(total))
    assert (dealt[total:] == -1).all()
    assert torch.equal(
        plan.subtracted.T.flatten()[:total].nan_to_num(7.0), plan.mean[dealt[:total].long()].nan_to_num(7.0)
    )
    assert (plan.subtracted.T.flatten()[total:] == 0).all()
    per_group = GROUPS // 2 if config.scales == "log" else GROUPS
    for chunk, (size, length) in enumerate(zip(plan.sizes, plan.lengths, strict=True)):
        widths = plan.width[chunk].tolist()
        assert widths == sorted(widths, reverse=True)
        order = list(zip([-w for w in widths[:length]], plan.index[chunk, :length].tolist(), strict=True))
        assert order == sorted(order)
        assert widths[length:] == [0] * (len(widths) - length)
        assert set(widths[:length]) <= set(config.widths)
        at = 0
        for k, width in enumerate(widths[:length]):
            assert plan.offset[chunk, k] == at
            at += 32 * width
        nonzero = sum(w > 0 for w in widths)
        assert plan.scales_at[chunk] == at
        assert plan.nonzero[chunk] == nonzero
        assert at + nonzero * (per_group + 2) == sum(cost(w, config) for w in widths) <= size


@pytest.mark.parametrize("numel", [1, 2, 255, 257, 1000, 5000, 100_000])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("config", [CodecConfig(), CodecConfig.paper(), CodecConfig(bits=2.2)], ids=str)
def test_index_width_and_offsets_fit_together(numel: int, chunks: int, config: CodecConfig, plan_of, normal) -> None:
    assert_consistent(plan_of([mixed(normal, i, numel) for i in range(2)], DynamiQ(config), chunks=chunks))


rows_of_statistics = st.one_of(
    st.floats(-38, 38).map(lambda e: 10.0**e),
    st.sampled_from([0.0, 1.0, 1.0, 1e-30, 1e30, math.nan, math.inf, 3e38, 1e-40]),
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    rms=st.lists(rows_of_statistics, min_size=1, max_size=70),
    share=st.floats(-1, 1),
    tail=st.integers(1, 256),
    chunks=st.integers(1, 9),
    workers=st.integers(1, 9),
    widths=st.sets(st.integers(0, 8), min_size=1).filter(lambda w: max(w) > 0),
    fraction=st.floats(0, 1),
    scales=st.sampled_from(["log", "linear"]),
)
def test_no_energies_whatever_overfill_a_message(
    rms: list[float],
    share: float,
    tail: int,
    chunks: int,
    workers: int,
    widths: set[int],
    fraction: float,
    scales: Any,
) -> None:
    base = CodecConfig(widths=tuple(sorted(widths)), scales=scales, bits=max(widths) + 1)
    low, high = base.bits_range()
    config = base.replace(bits=low + fraction * (high - low))
    statistics = torch.tensor([[share * r, r] for r in rms], dtype=torch.float64).float().bfloat16()
    plan = DynamiQ(config).plan(statistics, 256 * (len(rms) - 1) + tail, device=CPU, workers=workers, chunks=chunks)
    assert_consistent(plan)
    assert torch.isfinite(plan.expected_error)


def test_super_groups_are_dealt_by_falling_energy_and_ties_by_index() -> None:
    """Which chunk gets which; within a chunk they lie by falling width and then by index."""
    rms = torch.tensor([1.0, 4.0, 1.0, 2.0, 4.0, 0.0, 1.0])
    statistics = torch.stack((torch.zeros(7), rms), dim=1).bfloat16()
    plan = DynamiQ().plan(statistics, 7 * 256, device=CPU, workers=1, chunks=3)
    assert [set(row) for row in plan.index.tolist()] == [{1, 0, 5}, {4, 2, -1}, {3, 6, -1}]
    one_width = DynamiQ(CodecConfig(widths=(4,), bits=4.6)).plan(statistics, 7 * 256, device=CPU, workers=1, chunks=2)
    assert one_width.index.tolist() == [[1, 2, 3, 5], [0, 4, 6, -1]]


def test_a_partly_filled_super_group_has_the_energy_of_what_it_holds() -> None:
    statistics = torch.tensor([[0.0, 1.0], [0.0, 1.5]]).bfloat16()
    full = DynamiQ().plan(statistics, 512, device=CPU, workers=1, chunks=1)
    nearly_empty = DynamiQ().plan(statistics, 257, device=CPU, workers=1, chunks=1)
    assert (full.index[0, 0], nearly_empty.index[0, 0]) == (1, 0)
    assert full.width[0, 0] > full.width[0, 1]
    assert nearly_empty.width[0, 0] > nearly_empty.width[0, 1]


@pytest.mark.parametrize(
    ("config", "workers", "narrowest"),
    [
        (CodecConfig(), 1, 3),  # 2 bits would lose a fifth of the energy
        (CodecConfig(), 2, 3),
        (CodecConfig(), 4, 4),  # 3 bits would lose a tenth
        (CodecConfig(), 64, 4),  # a third, but 5 bits for everybody do not fit
        (CodecConfig(bits=7), 4, 4),
        (CodecConfig(bits=7), 64, 5),
        (CodecConfig(bits=4), 4, 3),
        (CodecConfig(bits=3), 4, 2),
        (CodecConfig(bits=3), 64, 0),  # 2 bits lose many times the energy, and 3 for everybody do not fit
        (CodecConfig(bits=2.5), 4, 0),
        (CodecConfig(widths=(0, 1, 3, 8)), 4, 3),
        (CodecConfig(widths=(0, 8)), 4, 0),
        (CodecConfig(tolerance=1 / 8), 4, 3),
        (CodecConfig(tolerance=1 / 2), 4, 3),  # 2 bits would lose 0.57
        (CodecConfig(tolerance=0.6), 4, 2),
        (CodecConfig(tolerance=0), 4, 4),  # 5 bits for everybody do not fit
        (CodecConfig(tolerance=0, bits=9), 4, 8),
        (CodecConfig(tolerance=1), 4, 0),
        (CodecConfig(tolerance=1, bits=6), 4, 0),
        (CodecConfig(widths=(2, 4, 8)), 4, 2),  # nothing is dropped, so there is no floor
        (CodecConfig.paper(), 4, 2),
        (CodecConfig.paper(), 64, 2),
        (CodecConfig.paper(bits=7), 4, 2),
    ],
    ids=str,
)
def test_super_groups_of_little_energy_get_the_narrowest_width_that_is_of_use(
    config: CodecConfig, workers: int, narrowest: int
) -> None:
    energy = torch.exp2(torch.linspace(0, -60, 6400))
    statistics = torch.stack([torch.zeros(6400), energy], dim=1).bfloat16()
    plan = DynamiQ(config).plan(
        statistics, 6400 * 256, device=CPU, workers=workers, chunks=workers, gain=(workers + 1) / 2
    )
    assert plan.width.min() == narrowest
    assert plan.width.max() == 8


def test_widths_are_the_greedys_for_these_energies(plan_of, normal) -> None:
    """The plan's widths spend the capacity as the hull says: no step that was left out beats one that was taken."""
    codec = DynamiQ(CodecConfig(bits=4.3))
    gradients = [mixed(normal, i, 50_000) for i in range(3)]
    plan = plan_of(gradients, codec)
    _, steps = hull(codec.config, 2.0, floor=3)
    rms = codec.merge_statistics([codec.statistics(x) for x in gradients])[:, 1].double()
    count = torch.tensor([256.0] * 195 + [80.0])
    energy = (rms.square() * count)[plan.index.long()]  # no mean is worth subtracting here
    assert (plan.mean == 0).all()
    for chunk in range(3):
        taken, left_out = [], []
        for k in range(plan.lengths[chunk]):
            for step in steps:
                gain = energy[chunk, k].item() * step.gain
                (taken if plan.width[chunk, k] >= step.width else left_out).append(gain)
        assert min(taken) >= max(left_out) * (1 - 1e-6)


@pytest.mark.parametrize(("bits", "narrowest"), [(2.8, 0), (2.9, 2), (3.8, 2), (3.9, 3)])
def test_whatever_has_energy_is_sent_once_the_budget_allows(bits: float, narrowest: int, plan_of, normal) -> None:
    """Energies fall by 2**-8 from super-group to super-group; the last four have none."""
    loudness = torch.exp2(-4.0 * torch.arange(16)).repeat_interleave(256)
    gradients = [torch.cat((normal(i, 16 * 256) * loudness, torch.zeros(4 * 256))) for i in range(2)]
    plan = plan_of(gradients, DynamiQ(CodecConfig(bits=bits)))
    width = torch.zeros(20, dtype=torch.int32)
    present = plan.index >= 0
    width[plan.index[present].long()] = plan.width[present]
    assert width[:16].min() == narrowest
    assert width[16:].max() == 0


def test_the_mean_is_subtracted_only_where_it_pays(normal) -> None:
    n, share = 3, torch.tensor([0.0, 0.02, 0.9 * MEAN_SHARE, 1.1 * MEAN_SHARE, 0.5, 1.0])
    # Sum of the means of n workers with that share of the energy sum of n S rms**2, rms of one worker being 1.
    statistics = torch.stack((n * share.sqrt(), torch.full((6,), n**0.5)), dim=1).bfloat16()
    plan = DynamiQ().plan(statistics, 6 * 256, device=CPU, workers=n, chunks=1)
    assert (plan.mean[:3] == 0).all()
    assert torch.equal(plan.mean[3:], statistics[3:, 0].float() / n)
    off = DynamiQ(CodecConfig(subtract_mean=False)).plan(statistics, 6 * 256, device=CPU, workers=n, chunks=1)
    assert (off.mean == 0).all()


def test_subtracted_energy_gets_no_bits(plan_of, normal) -> None:
    """A large constant plus a little noise counts as the noise, once the constant is subtracted."""
    x = normal(0, 8 * 256)
    x[:256] = 100 + 0.01 * x[:256]
    plan = plan_of([x, x], DynamiQ(CodecConfig(bits=3.0)), chunks=1)
    assert plan.mean[0] == pytest.approx(100, rel=2**-8)
    alone = DynamiQ(CodecConfig(bits=3.0, subtract_mean=False))
    assert plan_of([x, x], alone, chunks=1).index[0, 0] == 0
    # bfloat16 cannot tell less than 1/256 of the energy from its own rounding, so some is kept for the rest.
    assert plan.width[0, plan.index[0].tolist().index(0)] <= 8


def test_the_plan_does_not_depend_on_the_order_of_the_workers(plan_of, normal) -> None:
    gradients = [mixed(normal, i, 30_000) + 0.1 for i in range(5)]
    plan = plan_of(gradients, DynamiQ())
    assert_same(plan_of(gradients[::-1], DynamiQ()), plan)


def test_the_plan_depends_on_nothing_but_the_sums(plan_of, normal) -> None:
    """Step and bucket turn the random numbers and nothing else."""
    gradients = [mixed(normal, i, 30_000) for i in range(2)]
    plan = plan_of(gradients, DynamiQ(CodecConfig(seed=5)))
    other = plan_of(gradients, DynamiQ(CodecConfig(seed=5)), step=3, bucket=2)
    assert_same(other, plan)
    assert (plan.key, other.key) == ((5, 0, 0), (5, 3, 2))
    before = torch.get_rng_state()
    plan_of(gradients, DynamiQ())
    assert torch.equal(torch.get_rng_state(), before)


def test_scaling_all_gradients_changes_no_width(plan_of, normal) -> None:
    gradients = [mixed(normal, i, 30_000) for i in range(2)]
    plan = plan_of(gradients, DynamiQ())
    scaled = plan_of([x * 2.0**60 for x in gradients], DynamiQ())
    assert_same(scaled, plan, ("index", "width", "offset"))
    assert scaled.expected_error == plan.expected_error * 2.0**120


def test_the_ring_is_the_default_gain_and_a_larger_one_spends_more_on_few(plan_of, normal) -> None:
    gradients = [mixed(normal, i, 60_000) for i in range(8)]
    codec = DynamiQ(CodecConfig(bits=3.0))
    plan = plan_of(gradients, codec)
    assert_same(plan_of(gradients, codec, gain=4.5), plan)
    assert plan_of(gradients, codec, gain=40.0).nonzero.sum() < plan.nonzero.sum()
    assert plan_of(gradients, codec, gain=1.0).nonzero.sum() > plan.nonzero.sum()


@pytest.mark.parametrize("kind", ["dithered", "independent"])
def test_expected_error_adds_up_what_the_table_says(kind: Any, plan_of, normal) -> None:
    codec = DynamiQ(CodecConfig(bits=2.5, rounding=kind))
    gradients = [mixed(normal, i, 20_000) for i in range(3)]
    plan = plan_of(gradients, codec, gain=1.7)
    rms = codec.merge_statistics([codec.statistics(x) for x in gradients])[:, 1].double()
    errors = chained_errors(codec.config, 1.7)
    total = 0.0
    for row, widths in zip(plan.index.tolist(), plan.width.tolist(), strict=True):
        for j, width in zip(row, widths, strict=True):
            if j >= 0:
                energy = rms[j].item() ** 2 * min(256, 20_000 - 256 * j)
                total += energy * errors[width]
    assert plan.width.min() == 0
    assert plan.expected_error.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_the_gradients_have_in_common_is_learnt_from_their_mean(n: int, plan_of, normal) -> None:
    """Uncorrelated, equal and opposite gradients in three parts of one tensor, and the exact mean of each."""
    growth = (2 * n + 1) / 3
    part = 40 * 256
    common = mixed(normal, 50, part)
    weights = torch.linspace(-1.0, 1.0, n) if n > 1 else torch.ones(1)  # they add up to nothing
    rows = [torch.cat((mixed(normal, 60 + i, part), common, w * common)) for i, w in enumerate(weights)]
    plan = plan_of(rows, DynamiQ(CodecConfig(subtract_mean=False)))
    mean = torch.stack(rows).mean(dim=0)
    # As it would come out: with an error of its own in every super-group.
    energy = torch.zeros(120, dtype=torch.float64)
    error = torch.zeros(120, dtype=torch.float64)
    present = plan.index >= 0
    energy[plan.index[present].long()] = plan.energies[present]
    error[plan.index[present].long()] = plan.errors[present]
    factors = [1.0, growth, 1 - (growth - 1) / max(n - 1, 1)]
    expected = sum(f * e.sum() for f, e in zip(factors, error.split(40), strict=True))
    noise = normal(70, 3 * part) * (error / 256).sqrt().repeat_interleave(256) / n
    if n == 1:
        factors = [1.0] * 3
    got = plan.expected_error_of(squared_norms((mean + noise).float()), growth=growth)
    assert got.item() == pytest.approx(float(expected), rel=0.1)
    assert plan.expected_error_of(squared_norms(mean), growth=1.0).item() == pytest.approx(
        plan.expected_error.item(), rel=1e-12
    )


def test_nothing_is_learnt_from_what_is_not_sent(plan_of, normal) -> None:
    """Zeros, super-groups of width 0, and a mean that is not finite."""
    zeros = [torch.zeros(1000)] * 3
    assert plan_of(zeros, DynamiQ()).expected_error_of(squared_norms(zeros[0]), growth=3.0) == 0
    gradients = [mixed(normal, i, 20_000) for i in range(3)]
    plan = plan_of(gradients, DynamiQ(CodecConfig(widths=(0, 8), bits=1.0)))
    assert plan.width.max() == 8
    dropped = plan.errors[plan.width == 0].sum().item()
    assert plan.expected_error_of(squared_norms(torch.zeros(20_000)), growth=3.0).item() >= dropped > 0
    poisoned = torch.zeros(20_000)
    poisoned[plan.index[0, 0] * 256] = math.nan
    assert plan.expected_error_of(squared_norms(poisoned), growth=3.0).isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_super_groups_disturb_no_other(bad: float, plan_of, normal) -> None:
    """The plan is that of a super-group of zeros, but for the mean."""
    gradients = [mixed(normal, i, 10_000) for i in range(3)]
    for x in gradients:
        x[512:768] = 0
    clean = plan_of(gradients, DynamiQ())
    gradients[1][600] = bad
    plan = plan_of(gradients, DynamiQ())
    assert plan.mean[2].isnan()
    assert_same(with_mean_of(plan, clean), plan)
    others = torch.arange(len(plan.mean)) != 2
    assert torch.equal(plan.mean[others], clean.mean[others])
    chunk, k = (plan.index == 2).nonzero()[0].tolist()
    assert plan.width[chunk, k] == 0


@pytest.mark.parametrize("config", [CodecConfig(), CodecConfig(subtract_mean=False)], ids=str)
def test_energy_beyond_float32_is_marked_and_not_lost(config: CodecConfig, plan_of) -> None:
    """Two workers with +-3e38: their means cancel, but the root of the summed squares overflows."""
    x = torch.full((1024,), 3e38)
    x[::2] *= -1
    x[512:] = 1.0
    plan = plan_of([x, x], DynamiQ(config), chunks=1)
    assert plan.mean[:2].isnan().all()
    assert torch.isfinite(plan.mean[2:]).all()


def test_all_zeros(plan_of) -> None:
    plan = plan_of([torch.zeros(5000)] * 2, DynamiQ())
    assert (plan.width == 0).all()
    assert (plan.mean == 0).all()
    assert plan.expected_error == 0
