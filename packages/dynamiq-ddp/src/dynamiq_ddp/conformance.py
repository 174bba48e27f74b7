"""What every codec must do, as tests that pytest collects; needs pytest, and is imported by nothing else here.

A test file for one's own codec is four lines::

    from dynamiq_ddp.conformance import CodecConformance

    class TestMine(CodecConformance):
        make = staticmethod(MyCodec)
        worst = 0.02

The codec is tried alone and in the real engine: on all schedules, with one to eight ranks, and with gradients of
sizes that are no multiple of anything. What a codec loses is its own business, up to the bound that its test states.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq_core import Codec, Received

from .simulate import simulate

SCHEDULES = ("ring", "butterfly", "direct")
SIZES = {1: (1,), 2: (1, 33, 257, 1025), 3: (2, 31, 1000), 8: (5, 1025)}
"""Of gradients, by the number of ranks that have them: fewer coordinates than ranks, and tails of all kinds."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodecConformance:
    """Derive from it, name the class ``Test...``, and set ``make`` and ``worst``.

    Attributes:
        make: makes a codec; called anew where a test needs two that are alike.
        worst: largest vNMSE of the mean of four normal gradients that share a part, on any schedule.
        ranks: numbers of ranks to try, out of those of `SIZES`.
    """

    make: Callable[[], Codec[Any]]
    worst: float
    ranks: tuple[int, ...] = (1, 2, 3, 8)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every schedule and number of ranks where a test asks for them."""
        if "schedule" in metafunc.fixturenames:
            metafunc.parametrize("schedule", SCHEDULES)
        if "n" in metafunc.fixturenames:
            metafunc.parametrize("n", self.ranks)

    # ------------------------------------------------------------ in the engine

    def test_error_is_bounded(self, schedule: str) -> None:
        rows = gradients(4, 20_000)
        result = simulate(rows, codec=self.make(), schedule=schedule)
        assert result.vnmse <= self.worst
        assert torch.equal(rows, gradients(4, 20_000)), "the gradients have changed"

    def test_every_size_on_every_schedule(self, schedule: str, n: int) -> None:
        """`simulate` compares the ranks' bits; a coordinate that is not written keeps another value on every rank."""
        codec = self.make()
        for numel in SIZES[n]:
            mean = simulate(gradients(n, numel, seed=numel), codec=codec, schedule=schedule).mean
            assert mean.isfinite().all(), numel
        zero = simulate(torch.zeros(n, numel), codec=codec, schedule=schedule).mean
        assert not zero.any(), f"zeros became something else, of {numel}"

    def test_what_is_not_finite_reaches_every_rank_and_is_forgotten(self, schedule: str) -> None:
        """On any one rank, also in a tail; the next step is clean. Ranks that differ are an error of `simulate`."""
        codec, clean = self.make(), gradients(3, 3001)
        before = simulate(clean, codec=codec, schedule=schedule).mean
        for value, rank, where in ((torch.nan, 0, 1500), (torch.inf, 1, 0), (-torch.inf, 2, 3000)):
            rows = clean.clone()
            rows[rank, where] = value
            mean = simulate(rows, codec=codec, schedule=schedule).mean
            assert not mean[where].isfinite(), (value, rank, where)
        assert torch.equal(simulate(clean, codec=codec, schedule=schedule).mean, before)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_dtype_comes_back(self, dtype: torch.dtype) -> None:
        result = simulate(gradients(3, 20_000).to(dtype), codec=self.make())
        assert result.mean.dtype == dtype
        assert result.vnmse <= self.worst + 2.0**-16

    @pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, 1e30])
    def test_large_and_small_numbers(self, scale: float) -> None:
        rows = gradients(3, 4000) * scale
        mean = simulate(rows, codec=self.make()).mean
        assert mean.isfinite().all()
        assert mean.double().norm() <= 2 * rows.double().norm(dim=1).mean()

    def test_same_step_same_bits_and_no_global_generator(self) -> None:
        rows, state = gradients(3, 5000), torch.get_rng_state()
        first, second = (simulate(rows, codec=self.make(), step=7).mean for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(state, torch.get_rng_state())

    # -------------------------------------------------------------------- alone

    def test_sizes_of_messages_follow_from_the_shapes(self) -> None:
        codec, rows = self.make(), gradients(3, 6000)
        sparse = torch.zeros(3, 6000)
        sparse[2, 77] = 1e6
        for chunks in (1, 3, 8):
            sizes = [plan_of(codec, x, chunks=chunks).sizes for x in (rows, sparse, rows * 1e-30)]
            assert len(sizes[0]) == chunks
            assert sizes[0] == sizes[1] == sizes[2]

    def test_messages_fill_their_buffer(self) -> None:
        codec = self.make()
        for numel in (1, 33, 1025):
            rows = gradients(2, numel)
            plan = plan_of(codec, rows, chunks=3)
            for chunk, size in enumerate(plan.sizes):
                out = torch.full((size,), 0xA5, dtype=torch.uint8)
                assert codec.compress(rows[0], plan, chunk=chunk, slot=0, out=out) is out
                again = codec.compress(rows[0], plan, chunk=chunk, slot=0)
                assert torch.equal(out, again), "what was in the buffer before matters"

    def test_every_coordinate_belongs_to_one_chunk(self) -> None:
        codec = self.make()
        for numel in (1, 2, 255, 1025):
            rows = gradients(1, numel)
            plan = plan_of(codec, rows, chunks=3)
            written = torch.zeros(numel, dtype=torch.int64)
            for chunk in range(3):
                out = torch.full((numel,), torch.nan)
                message = codec.compress(rows[0], plan, chunk=chunk, slot=0)
                assert codec.decompress(message, plan, chunk=chunk, slot=0, out=out) is out
                written += ~out.isnan()
            assert (written == 1).all(), numel

    def test_nothing_is_read_on_the_host(self) -> None:
        """On the meta device tensors have no values: whatever asks for one fails."""
        codec = self.make()
        rows = torch.empty(2, 3000, device="meta")
        plan = plan_of(codec, rows, chunks=2)
        message = codec.compress(rows[0], plan, chunk=1, slot=0)
        received = [Received(message, 0)]
        message = codec.decompress_accumulate_recompress(received, rows[1], plan, chunk=1, slot=1)
        out = codec.decompress(message, plan, chunk=1, slot=1, out=torch.empty(3000, device="meta"))
        assert (out.device.type, out.shape) == ("meta", (3000,))

    def test_fingerprint_is_one_line_that_two_of_a_kind_share(self) -> None:
        one, other = self.make().fingerprint(), self.make().fingerprint()
        assert one == other
        assert len(one.splitlines()) == 1


def gradients(n: int, d: int, *, seed: int = 0) -> Tensor:
    """Normal gradients [n, d] that share a part, as those of real workers do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d, generator=generator) + torch.randn(n, d, generator=generator)


def plan_of(codec: Codec[Any], rows: Tensor, *, chunks: int) -> Any:
    """The plan of an all-reduce over the rows of ``rows`` [n, d]."""
    parts = [part for part in map(codec.statistics, rows) if part is not None]
    return codec.plan(
        codec.merge_statistics(parts) if parts else None,
        rows.shape[1],
        device=rows.device,
        workers=len(rows),
        chunks=chunks,
    )
