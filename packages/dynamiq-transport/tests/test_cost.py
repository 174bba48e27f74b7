"""The cost model against the schedules themselves, and the measurement of its numbers."""

from __future__ import annotations

import time

import pytest
import torch

from dynamiq_transport import (
    Link,
    LocalTransport,
    Transport,
    butterfly,
    choose,
    direct,
    explain,
    measure,
    ring,
    run_local,
)
from dynamiq_transport.cost import SECONDS
from dynamiq_transport.schedules import ScheduleFunction, Step

LINK = Link(latency=50e-6, overhead=7e-6, bandwidth=1e8)


def seconds_step_by_step(schedule: ScheduleFunction, nbytes: float, size: int, link: Link) -> float:
    """The model applied to the steps as they are: the busiest rank counts."""
    plans = [schedule(rank, size) for rank in range(size)]
    chunk = nbytes / plans[0].chunks

    def busiest(steps: tuple[Step, ...]) -> float:
        messages = max(len(step.sends) for step in steps)
        chunks = max(sum(len(part) for _, part in step.sends) for step in steps)
        return link.latency + (messages - 1) * link.overhead + chunks * chunk / link.bandwidth

    phases = (zip(*(plan.reduce for plan in plans), strict=True), zip(*(plan.gather for plan in plans), strict=True))
    return sum(busiest(steps) for phase in phases for steps in phase)


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("schedule", SECONDS, ids=lambda schedule: schedule.__name__)
def test_formulas_agree_with_the_steps(schedule: ScheduleFunction, size: int) -> None:
    for nbytes in (0.0, 1e3, 1e7):
        assert SECONDS[schedule](nbytes, size, LINK) == pytest.approx(
            seconds_step_by_step(schedule, nbytes, size, LINK)
        )


def test_choice() -> None:
    assert choose(1e6, 4, LINK) is direct  # one switch, few ranks
    assert choose(1e3, 16, LINK) is direct
    expensive = LINK._replace(overhead=200e-6)
    assert choose(1e3, 64, expensive) is butterfly  # 62 further messages cost more than 5 more steps
    assert choose(1e9, 48, expensive) is direct  # a large message hides all of it
    assert choose(3e7, 48, Link(1e-6, 10e-3, 1e8)) is ring  # the butterfly would have to fold 16 ranks in
    assert choose(1e6, 1, LINK) in SECONDS


@pytest.mark.parametrize(
    ("nbytes", "size", "link"),
    [(-1, 4, LINK), (1, 0, LINK), (1, 4, LINK._replace(bandwidth=0)), (1, 4, LINK._replace(latency=float("nan")))],
)
def test_numbers_out_of_range(nbytes: float, size: int, link: Link) -> None:
    with pytest.raises(ValueError, match="no choice"):
        choose(nbytes, size, link)


def test_table_shows_every_time_and_the_choice() -> None:
    table = explain([1e4, 1e7], 4, LINK)
    assert "4 ranks, latency 50 us, 7 us per further message, 100 MB/s" in table
    for nbytes in (1e4, 1e7):
        line = next(line for line in table.splitlines() if f"{nbytes:,.0f}" in line)
        assert line.endswith(choose(nbytes, 4, LINK).__name__)
        for model in SECONDS.values():
            assert f"{model(nbytes, 4, LINK) * 1e3:.3f} ms" in line


class Slow(LocalTransport):
    """Takes known times: 20 ms, 5 ms per further message, and 100 MB/s."""

    def exchange(self, sends, recvs):  # type: ignore[no-untyped-def]
        total = sum(tensor.numel() for _, tensor in sends)
        if total > 4:  # not the records that line the ranks up
            time.sleep(20e-3 + 5e-3 * (len(sends) - 1) + total / 1e8)
        return super().exchange(sends, recvs)


def test_measured_numbers_are_found_and_equal_on_all_ranks() -> None:
    """The sleeps are lower bounds whatever the load; above them only orders of magnitude are sure."""

    def work(transport: Transport) -> Link:
        transport.__class__ = Slow
        return measure(transport, repeats=3)

    found = run_local(3, work, timeout=60.0)
    assert found[0] == found[1] == found[2]
    assert found[0].latency >= 20e-3
    assert found[0].bandwidth <= 1e8
    assert found[0].overhead > 0


def test_a_rank_alone_measures_nothing() -> None:
    assert run_local(1, measure, timeout=5.0) == [Link(0.0, 0.0, float("inf"))]
    assert torch.isfinite(
        torch.tensor([model(1e6, 1, Link(0.0, 0.0, float("inf"))) for model in SECONDS.values()])
    ).all()
