"""Schedules run on paper: which gradients each encoding contains, and whether a schedule is sound at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dynamiq_transport.schedules.schedule import Schedule, ScheduleFunction, Step


class Encoding(NamedTuple):
    """One quantisation of one chunk.

    Attributes:
        rank: who encodes; also the slot of the quantisation.
        chunk: which chunk.
        contributors: bit r is set when the gradient of rank r is in the encoded partial sum.
    """

    rank: int
    chunk: int
    contributors: int


def encodings(function: ScheduleFunction, size: int) -> Iterator[Encoding]:
    """Replay the reduce steps of all ranks and yield every encoding in the order of time.

    Args:
        function: the schedule.
        size: number of ranks n.
    """
    schedules = [function(rank, size) for rank in range(size)]
    held = [[1 << rank] * schedules[0].chunks for rank in range(size)]  # [rank][chunk] -> contributors
    for t in range(len(schedules[0].reduce)):
        arriving = []
        for schedule in schedules:
            for peer, chunks in schedule.reduce[t].sends:
                for chunk in chunks:
                    mask = held[schedule.rank][chunk]
                    arriving.append((peer, chunk, mask))
                    yield Encoding(schedule.rank, chunk, mask)
        for peer, chunk, mask in arriving:
            held[peer][chunk] |= mask
    for schedule in schedules:
        for chunk in schedule.owned:
            yield Encoding(schedule.rank, chunk, held[schedule.rank][chunk])


def gain(function: ScheduleFunction, size: int) -> float:
    """Mean number of gradients in an encoded partial sum; every rank encodes every chunk once.

    The squared error of a quantiser grows with the energy of what it encodes, so the error of the final sum is about
    this many times that of quantising each of the n gradients once: (n + 1) / 2 for the ring, (2 n - 1) / n for the
    direct exchange.

    Args:
        function: the schedule.
        size: number of ranks n.
    """
    counts = [encoding.contributors.bit_count() for encoding in encodings(function, size)]
    return sum(counts) / len(counts)


def common_gain(function: ScheduleFunction, size: int) -> float:
    """The `gain` if all gradients are the same: the mean square of the number of gradients in an encoded partial sum.

    A sum of k equal gradients has k**2 times the energy of one. For the ring it is (n + 1) (2 n + 1) / 6.

    Args:
        function: the schedule.
        size: number of ranks n.
    """
    counts = [encoding.contributors.bit_count() for encoding in encodings(function, size)]
    return sum(count**2 for count in counts) / len(counts)


def check_schedule(function: ScheduleFunction, size: int) -> None:
    """Prove a schedule right for one number of ranks, without communication.

    Checked: sends and receives match step by step and in order; every chunk is reduced exactly once from every rank;
    every rank encodes every chunk exactly once; every rank ends with every finished chunk and sends only what it has.

    Args:
        function: the schedule.
        size: number of ranks n.

    Raises:
        ValueError: it is not, and the message says where.
    """
    schedules = [function(rank, size) for rank in range(size)]
    _check_shape(schedules, size)
    for phase in ("reduce", "gather"):
        for t, steps in enumerate(zip(*(getattr(schedule, phase) for schedule in schedules), strict=True)):
            _check_match(steps, f"{phase} step {t}")
    _check_reduce(schedules)
    _check_gather(schedules)


def _check_shape(schedules: list[Schedule], size: int) -> None:
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        if (schedule.rank, schedule.size, schedule.chunks) != (rank, size, first.chunks):
            raise ValueError(f"rank {rank} of {size} has a schedule for {schedule[1:4]} (rank, size, chunks)")
        if (len(schedule.reduce), len(schedule.gather)) != (len(first.reduce), len(first.gather)):
            raise ValueError(f"rank {rank} has another number of steps than rank 0")
    owners = sorted(chunk for schedule in schedules for chunk in schedule.owned)
    if owners != list(range(first.chunks)):
        raise ValueError(f"every chunk needs one owner; owned are {owners} of {first.chunks}")


def _check_match(steps: tuple[Step, ...], where: str) -> None:
    sent = sorted((rank, peer, chunks) for rank, step in enumerate(steps) for peer, chunks in step.sends)
    received = sorted((peer, rank, chunks) for rank, step in enumerate(steps) for peer, chunks in step.recvs)
    if sent != received:
        odd = sorted(set(sent) ^ set(received)) or sent
        raise ValueError(f"{where}: sends and receives do not match: (source, target, chunks) {odd[:4]}")
    if any(source == target for source, target, _ in sent):
        raise ValueError(f"{where}: a rank sends to itself")
    if len({(source, target) for source, target, _ in sent}) != len(sent):
        raise ValueError(f"{where}: more than one message from a rank to another")


def _check_reduce(schedules: list[Schedule]) -> None:
    size, chunks = len(schedules), schedules[0].chunks
    held = [[1 << rank] * chunks for rank in range(size)]
    encoded: set[tuple[int, int]] = set()
    for t in range(len(schedules[0].reduce)):
        arriving = []
        for rank, schedule in enumerate(schedules):
            for peer, sent in schedule.reduce[t].sends:
                for chunk in sent:
                    if (rank, chunk) in encoded:
                        raise ValueError(f"reduce step {t}: rank {rank} encodes chunk {chunk} a second time")
                    encoded.add((rank, chunk))
                    arriving.append((peer, chunk, held[rank][chunk]))
        for peer, chunk, mask in arriving:
            if (peer, chunk) in encoded:
                raise ValueError(f"reduce step {t}: rank {peer} receives chunk {chunk} after encoding it")
            if held[peer][chunk] & mask:
                raise ValueError(f"reduce step {t}: chunk {chunk} at rank {peer} holds a gradient twice")
            held[peer][chunk] |= mask
    for rank, schedule in enumerate(schedules):
        for chunk in schedule.owned:
            if (rank, chunk) in encoded:
                raise ValueError(f"rank {rank} has sent away chunk {chunk}, which it owns")
            encoded.add((rank, chunk))
            if held[rank][chunk] != (1 << size) - 1:
                raise ValueError(f"chunk {chunk} at its owner {rank} lacks gradients")
    if len(encoded) != size * chunks:
        raise ValueError(f"{size * chunks - len(encoded)} encodings are missing; every rank encodes every chunk once")


def _check_gather(schedules: list[Schedule]) -> None:
    held = [set(schedule.owned) for schedule in schedules]
    for t in range(len(schedules[0].gather)):
        arriving = []
        for rank, schedule in enumerate(schedules):
            for peer, sent in schedule.gather[t].sends:
                if not held[rank].issuperset(sent):
                    raise ValueError(f"gather step {t}: rank {rank} sends a chunk of {sent} before it has it")
                arriving.append((peer, sent))
        for peer, sent in arriving:
            if held[peer].intersection(sent):
                raise ValueError(f"gather step {t}: rank {peer} receives a chunk of {sent} again")
            held[peer].update(sent)
    for rank, have in enumerate(held):
        if len(have) != schedules[0].chunks:
            raise ValueError(f"rank {rank} ends with chunks {sorted(have)} of {schedules[0].chunks}")
