"""How far compressed gradients are from the exact ones: what the codec expects, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamiq_core import DynamiQPlan, Plan, vnmse
from dynamiq_core.statistics import squared_norms

from .engine import Job, reduce_tensor
from .exact import Exact
from .meter import Meter
from .nodes import own_part
from .route import Route

EXPECTED_EVERY = 8
"""Steps from one for which the error is foreseen to the next: it goes through the mean once more and takes fifty
operations, which in every step would be a good part of the codec's time where buckets are small."""


class Quality:
    """Errors of the all-reduces of one lane.

    Attributes:
        step: the last one of which anything was measured, or None.
        error: squared error of the mean, measured in that step, over all its buckets.
        energy: squared norm of the exact mean, likewise.
        widths: in that step, how many super-groups had which bit width.
    """

    def __init__(self) -> None:
        self._expected: dict[torch.device, Tensor] = {}  # float64 [2] on a gradient's device: squared error and norm
        self._foreseen: int | None = None  # last step for which that was done
        self._forget(None)

    def _forget(self, step: int | None) -> None:
        self.step = step
        self.error = self.energy = 0.0
        self.widths: dict[int, int] = {}

    def expect_sometimes(self, plan: Plan, mean: Tensor, route: Route) -> None:
        """As `expect`, in the first step and in every eighth from there."""
        if isinstance(plan, DynamiQPlan):
            step = plan.key.step
            if self._foreseen is None or not self._foreseen <= step < self._foreseen + EXPECTED_EVERY:
                self._foreseen = step
            if step == self._foreseen:
                self.expect(plan, mean, route)

    def expect(self, plan: Plan, mean: Tensor, route: Route) -> None:
        """Add what a plan expects, if it says so; nothing is read on the host.

        Args:
            plan: of an all-reduce that has been done.
            mean: its result.
            route: the way that it went.
        """
        if isinstance(plan, DynamiQPlan):
            squares = squared_norms(mean)
            error = plan.expected_error_of(squares, growth=route.growth)
            both = torch.stack((error / plan.workers**2, squares.sum()))
            both = torch.where(both.isfinite().all(), both, 0.0)  # a step with an overflow says nothing
            before = self._expected.get(both.device)
            self._expected[both.device] = both if before is None else before + both

    def expected(self) -> tuple[float, float]:
        """Squared error and squared norm of the means so far, as expected; waits for the device."""
        every = [both.tolist() for both in self._expected.values()]
        return sum(error for error, _ in every), sum(energy for _, energy in every)

    def measure(self, step: int, plans: Sequence[Plan], mean: Tensor, exact: Tensor) -> None:
        """Compare a bucket with its exact mean; waits for the device.

        Args:
            step: to which the bucket belongs; a new one starts the sums anew.
            plans: of the compressed all-reduce.
            mean: its result.
            exact: what it should be.
        """
        if self.step != step:
            self._forget(step)
        energy = float(exact.to(torch.float64).square().sum())
        self.error += vnmse(mean, exact) * energy if energy else float(mean.to(torch.float64).square().sum())
        self.energy += energy
        for plan in plans:
            if not isinstance(plan, DynamiQPlan):
                continue
            for width, count in enumerate(torch.bincount(plan.width[plan.index >= 0]).tolist()):
                self.widths[width] = self.widths.get(width, 0) + count


def reduce_and_predict(tensor: Tensor, job: Job, quality: Quality) -> None:
    """Average a tensor, and in some steps note what error its codec expects."""
    reduce_tensor(tensor, job._replace(watch=quality.expect_sometimes))


def reduce_and_measure(tensor: Tensor, job: Job, quality: Quality) -> None:
    """Average a tensor, and a copy of it without compression, and note how far apart the results are.

    With error feedback the codec is given a gradient and a residual, so their sum is what is averaged exactly.
    """
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    if job.feedback is not None:
        part, ranks = own_part(exact.view(-1), job.route)
        job.feedback.add_to(part, times=ranks)
    aside = Meter()  # a measurement is no part of what an all-reduce costs, but its bytes are bytes
    plans: list[Plan] = []

    def watch(plan: Plan, mean: Tensor, route: Route) -> None:
        plans.append(plan)
        quality.expect(plan, mean, route)

    reduce_tensor(tensor, job._replace(watch=watch))
    reduce_tensor(exact, job._replace(codec=Exact(exact.dtype), meter=aside, feedback=None))
    job.meter.bytes["measurement"] += aside.bytes_sent
    quality.measure(job.step, plans, tensor.view(-1), exact.view(-1))
