"""Every schedule, for 1 to 17 ranks, run with sets of ranks in place of sums; no communication, no other checker."""

from __future__ import annotations

from collections import Counter

import pytest

from dynamiq_transport import (
    Schedule,
    ScheduleFunction,
    Step,
    butterfly,
    check_schedule,
    common_gain,
    direct,
    gain,
    ring,
)
from dynamiq_transport.schedules import encodings

ALL = [ring, butterfly, direct]
SIZES = range(1, 18)

everywhere = pytest.mark.parametrize("size", SIZES)
every_schedule = pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.__name__)


@everywhere
@every_schedule
def test_sends_and_receives_match_step_by_step(schedule: ScheduleFunction, size: int) -> None:
    plans = [schedule(rank, size) for rank in range(size)]
    assert len({(len(plan.reduce), len(plan.gather)) for plan in plans}) == 1
    for phase in ("reduce", "gather"):
        for steps in zip(*(getattr(plan, phase) for plan in plans), strict=True):
            sent = Counter((rank, peer, chunks) for rank, step in enumerate(steps) for peer, chunks in step.sends)
            received = Counter((peer, rank, chunks) for rank, step in enumerate(steps) for peer, chunks in step.recvs)
            assert sent == received
            assert all(count == 1 and source != target for (source, target, _), count in sent.items())


@everywhere
@every_schedule
def test_every_chunk_is_reduced_once_from_every_rank_and_reaches_every_rank(
    schedule: ScheduleFunction, size: int
) -> None:
    plans = [schedule(rank, size) for rank in range(size)]
    chunks = plans[0].chunks
    # parts[rank][chunk]: the gradients that rank would put into its encoding of chunk, as a multiset
    parts = [[Counter([rank]) for _ in range(chunks)] for rank in range(size)]
    encoded = Counter[tuple[int, int]]()
    for t in range(len(plans[0].reduce)):
        messages = []
        for plan in plans:
            for peer, sent in plan.reduce[t].sends:
                for chunk in sent:
                    encoded[plan.rank, chunk] += 1
                    messages.append((peer, chunk, parts[plan.rank][chunk]))
        for peer, chunk, content in messages:
            assert encoded[peer, chunk] == 0, "a message that comes after the encoding is lost"
            parts[peer][chunk] = parts[peer][chunk] + content
    finished: list[dict[int, int]] = [{} for _ in range(size)]  # [rank][chunk] -> owner whose bytes these are
    for plan in plans:
        for chunk in plan.owned:
            encoded[plan.rank, chunk] += 1
            assert parts[plan.rank][chunk] == Counter(range(size))
            finished[plan.rank][chunk] = plan.rank
    assert encoded == Counter((rank, chunk) for rank in range(size) for chunk in range(chunks))
    assert sorted(chunk for plan in plans for chunk in plan.owned) == list(range(chunks))
    for t in range(len(plans[0].gather)):
        forwarded = [
            (peer, chunk, finished[plan.rank][chunk])
            for plan in plans
            for peer, sent in plan.gather[t].sends
            for chunk in sent
        ]
        for peer, chunk, owner in forwarded:
            assert chunk not in finished[peer], "received twice"
            finished[peer][chunk] = owner
    owners = {chunk: plan.rank for plan in plans for chunk in plan.owned}
    assert finished == [owners] * size


@everywhere
def test_numbers_of_steps_messages_and_chunks(size: int) -> None:
    power = 1 << (size.bit_length() - 1)
    hops = power.bit_length() - 1
    for rank in range(size):
        around, across, wings = ring(rank, size), direct(rank, size), butterfly(rank, size)
        assert (around.chunks, across.chunks, wings.chunks) == (size, size, power)
        assert _messages(around) == 2 * (size - 1)
        assert _messages(across) == 2 * (size - 1)
        assert len(around.reduce) == len(around.gather) == size - 1
        assert len(across.reduce) == len(across.gather) == min(1, size - 1)
        assert len(wings.reduce) == len(wings.gather) == hops + (size > power)
        if rank >= power:  # hands everything over, and gets everything back
            assert _messages(wings) == 1
        else:
            assert _messages(wings) == 2 * hops + (rank + power < size)


def _messages(plan: Schedule) -> int:
    return sum(len(step.sends) for step in (*plan.reduce, *plan.gather))


@everywhere
def test_gain_against_the_formulas(size: int) -> None:
    power = 1 << (size.bit_length() - 1)
    assert gain(ring, size) == pytest.approx((size + 1) / 2)
    assert gain(direct, size) == pytest.approx((2 * size - 1) / size)
    if size == power:  # of a chunk, p / 2 ranks encode one gradient, p / 4 two, ..., and the owner all of them
        assert gain(butterfly, size) == pytest.approx((power.bit_length() - 1) / 2 + 1)
    assert common_gain(ring, size) == pytest.approx((size + 1) * (2 * size + 1) / 6)
    assert common_gain(direct, size) == pytest.approx((size**2 + size - 1) / size)
    assert all(0 < encoding.contributors < 1 << size for encoding in encodings(butterfly, size))


@every_schedule
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 4), (4, 4), (0, -3)])
def test_rank_outside_the_group(schedule: ScheduleFunction, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        schedule(rank, size)


@everywhere
@every_schedule
def test_check_schedule_accepts_ours(schedule: ScheduleFunction, size: int) -> None:
    check_schedule(schedule, size)


def _without_last_reduce(rank: int, size: int) -> Schedule:
    plan = ring(rank, size)
    return plan._replace(reduce=plan.reduce[:-1])


def _without_last_gather(rank: int, size: int) -> Schedule:
    plan = ring(rank, size)
    return plan._replace(gather=plan.gather[:-1])


def _one_deaf(rank: int, size: int) -> Schedule:
    plan = direct(rank, size)
    return plan._replace(reduce=(Step(plan.reduce[0].sends, ()),)) if rank == 1 else plan


def _nobody_owns(rank: int, size: int) -> Schedule:
    return ring(rank, size)._replace(owned=(0,))


def _twice(rank: int, size: int) -> Schedule:
    plan = ring(rank, size)
    return plan._replace(reduce=plan.reduce + plan.reduce[:1])


def _wrong_direction(rank: int, size: int) -> Schedule:
    plan = ring(rank, size)
    return plan._replace(gather=tuple(reversed(plan.gather)))


def _uneven(rank: int, size: int) -> Schedule:
    plan = ring(rank, size)
    return plan._replace(reduce=plan.reduce[:-1]) if rank == 0 else plan


def _to_itself(rank: int, size: int) -> Schedule:
    plan = direct(rank, size)
    return plan._replace(reduce=(Step((*plan.reduce[0].sends, (rank, (0,))), (*plan.reduce[0].recvs, (rank, (0,)))),))


def _again_to_all(rank: int, size: int) -> Schedule:
    plan = direct(rank, size)
    return plan._replace(gather=plan.gather * 2)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (_without_last_reduce, "lacks gradients"),
        (_without_last_gather, "ends with chunks"),
        (_one_deaf, "do not match"),
        (_nobody_owns, "one owner"),
        (_twice, "a second time"),
        (_wrong_direction, "before it has it"),
        (_uneven, "another number of steps"),
        (_to_itself, "sends to itself"),
        (_again_to_all, "again"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_check_schedule_refuses_broken_ones(broken: ScheduleFunction, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_schedule(broken, 5)
