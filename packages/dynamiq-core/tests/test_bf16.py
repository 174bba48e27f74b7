"""The bfloat16 codec against torch's own rounding."""

import pytest
import torch

from dynamiq_core import InputError, Received
from dynamiq_core.baselines import BF16
from dynamiq_core.baselines.bf16 import range_plan

CPU = torch.device("cpu")


def plan_for(x: torch.Tensor, *, workers: int = 1, chunks: int = 1):
    return BF16().plan(None, x.numel(), device=CPU, workers=workers, chunks=chunks)


@pytest.mark.parametrize(("numel", "chunks"), [(1, 1), (1, 4), (10, 4), (1000, 3), (7, 8)])
def test_ranges_cover_every_coordinate_once(numel, chunks):
    plan = range_plan(numel, workers=3, chunks=chunks, itemsize=2)
    parts = [plan.part(torch.arange(numel), chunk) for chunk in range(chunks)]
    assert torch.equal(torch.cat(parts), torch.arange(numel))
    lengths = [part.numel() for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert plan.sizes == tuple(2 * length for length in lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hop_adds_in_float32_and_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randn(3, 1001, generator=generator).to(dtype)
    codec, plan = BF16(), plan_for(x, workers=3, chunks=2)
    for chunk in range(2):
        first = codec.compress(x, plan, chunk=chunk, slot=0)
        second = codec.compress(y, plan, chunk=chunk, slot=1)
        out = torch.full((plan.sizes[chunk],), 255, dtype=torch.uint8)
        last = codec.decompress_accumulate_recompress(
            [Received(first, 0), Received(second, 1)], z, plan, chunk=chunk, slot=2, out=out
        )
        assert last is out
        parts = [plan.part(v, chunk).float() for v in (z, x.bfloat16(), y.bfloat16())]
        assert torch.equal(last.view(torch.bfloat16), (parts[0] + parts[1] + parts[2]).bfloat16())


def test_decompress_divides_by_the_workers_and_leaves_other_chunks_alone():
    x = torch.tensor([3.0, 6.0, 9.0, 12.0])
    plan = plan_for(x, workers=3, chunks=2)
    out = torch.full((4,), torch.nan)
    BF16().decompress(BF16().compress(x, plan, chunk=1, slot=0), plan, chunk=1, slot=0, out=out)
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [3.0, 4.0]


def test_a_sum_beyond_float16_survives_the_message():
    x = torch.full((5,), 60000.0, dtype=torch.float16)
    plan = plan_for(x, workers=2)
    message = BF16().decompress_accumulate_recompress(
        [Received(BF16().compress(x, plan, chunk=0, slot=0), 0)], x, plan, chunk=0, slot=1
    )
    out = BF16().decompress(message, plan, chunk=0, slot=1, out=torch.empty_like(x))
    assert out.isfinite().all()
    assert ((out - 60000).abs() <= 60000 * 2**-8).all()


def test_non_finite_values_pass_through():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    plan = plan_for(x)
    out = BF16().decompress(BF16().compress(x, plan, chunk=0, slot=0), plan, chunk=0, slot=0, out=torch.empty(4))
    assert torch.equal(out.nan_to_num(7.0, 8.0, 9.0), torch.tensor([7.0, 8.0, 9.0, 1.0]))


@pytest.mark.parametrize("bad", [{"numel": 0}, {"workers": 0}, {"chunks": -1}])
def test_sizes_must_be_positive(bad):
    with pytest.raises(InputError, match="must be positive"):
        range_plan(**{"numel": 1, "workers": 1, "chunks": 1, "itemsize": 2, **bad})
