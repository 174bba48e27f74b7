"""Block sparsification: which blocks are sent, and that they are sent as they are."""

from __future__ import annotations

import pytest
import torch

from dynamiq_core import ConfigError, InputError
from dynamiq_core.baselines import OmniReduce
from dynamiq_core.baselines.omnireduce import BLOCK


def uneven(seed: int, workers: int, blocks: int, normal) -> torch.Tensor:
    """Rows whose blocks have very different norms, and not the same ones on every rank: [n, blocks * 256]."""
    rows = normal(seed, workers, blocks, BLOCK)
    return (rows * torch.exp(2 * normal(seed + 1, workers, blocks, 1))).view(workers, -1)


@pytest.mark.parametrize("bits", [1.0, 5.0, 8.0])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_blocks_with_the_largest_global_norm_arrive_and_no_others(bits, workers, normal, all_reduce):
    blocks = 50
    rows = uneven(0, workers, blocks, normal)
    norms = rows.view(workers, blocks, BLOCK).double().square().sum(dim=(0, 2))
    count = int(blocks * (bits - 1 / 16) / 16)
    largest = set(norms.topk(count).indices.tolist())
    mean = all_reduce([*rows], OmniReduce(bits)).mean.view(blocks, BLOCK)
    assert {block for block in range(blocks) if mean[block].any()} == largest
    exact = rows.double().mean(dim=0).view(blocks, BLOCK)
    for block in largest:
        # Each of n encodings rounds a partial sum, no longer than the sum of the norms, by at most 2**-9.
        lengths = rows.view(workers, blocks, BLOCK)[:, block].double().norm(dim=1).sum()
        assert (mean[block] - exact[block]).norm() <= 2**-9 * lengths


@pytest.mark.parametrize("numel", [10 * BLOCK, 10 * BLOCK - 100])
def test_a_budget_for_everything_sends_everything(numel, normal, all_reduce):
    rows = normal(2, 4, numel)
    mean = all_reduce([*rows], OmniReduce(17)).mean
    exact = rows.double().mean(dim=0)
    assert (mean - exact).abs().max() <= 2**-9 * rows.abs().sum(dim=0).max()


def test_bits_on_the_wire_are_the_budget(plan_of, normal):
    rows = uneven(3, 4, 2000, normal)
    for bits in (0.5, 3.7, 8.0):
        plan = plan_of([*rows], OmniReduce(bits))
        total = 8 * (sum(plan.sizes) + 2 * 2000) / rows.shape[1]
        assert bits - 16 / 2000 <= total <= bits
        assert max(plan.sizes) - min(plan.sizes) <= 2 * BLOCK


def test_equal_norms_are_taken_in_order(plan_of):
    plan = plan_of([torch.ones(16 * BLOCK)] * 2, OmniReduce(4.1))
    assert plan.sent == (2, 2)
    assert plan.order[:, :2].T.flatten().tolist() == [0, 1, 2, 3]


def test_nothing_that_is_not_finite_is_hidden(normal, all_reduce):
    """Not even when there are more such blocks than are sent; a small norm does not matter either."""
    rows = [*(1e-20 * normal(4, 2, 20 * BLOCK))]
    bad = {*range(0, 20, 2)}
    for block in bad:
        rows[block % 4 // 2][block * BLOCK + 7] = torch.nan if block % 3 else torch.inf
    mean = all_reduce(rows, OmniReduce(2.0)).mean.view(20, BLOCK)
    assert {block for block in range(20) if not mean[block, 7].isfinite()} == bad
    rows = [*normal(5, 2, 20 * BLOCK)]
    rows[1][300] = -torch.inf
    mean = all_reduce(rows, OmniReduce(2.0)).mean
    assert (~mean.isfinite()).nonzero().flatten().tolist() == [300]


def test_statistics_of_another_gradient_are_refused(plan_of):
    codec = OmniReduce()
    rows = codec.statistics(torch.ones(300))
    with pytest.raises(InputError, match=r"statistics must be of shape \(1, 1\), not \(2, 1\)"):
        codec.plan(rows, 256, device=rows.device, workers=1, chunks=1)


@pytest.mark.parametrize("bits", [0, 0.2, 18, True, "5"])
def test_budgets_out_of_range_are_refused(bits):
    with pytest.raises(ConfigError, match="bits of OmniReduce must be from"):
        OmniReduce(bits)
