"""What a schedule costs, and which one to use: a model of three numbers that are measured, and nothing else.

A step takes the latency once, an overhead for every message after the first that a rank sends in it, and the bytes that
the busiest rank sends divided by its bandwidth (the LogGP model; Alexandrov et al. 1995). With B the bytes of one full
message of the all-reduce in one direction, n ranks, and p the largest power of two up to n::

    ring       2 (n - 1) (L + B / (n W))
    butterfly  2 log2(p) L + 2 (1 - 1/p) B / W,  and 2 (L + B / W) more when n > p
    direct     2 (L + (n - 2) o + (1 - 1/n) B / W)

The codec is left out: on every schedule every rank encodes every chunk once and decodes as much as it receives. So is
contention: ``direct`` assumes a network on which all pairs speak at once at full speed, as is true behind one switch.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dynamiq_transport.agree import gather_records
from dynamiq_transport.schedules import ScheduleFunction, butterfly, direct, ring
from dynamiq_transport.transport import Message, Transport


class Link(NamedTuple):
    """What a rank's connection to the others does.

    Attributes:
        latency: seconds from posting a small exchange to its end (L).
        overhead: seconds that each further small message in the same batch adds (o).
        bandwidth: bytes per second that a rank sends while it receives as many (W).
    """

    latency: float
    overhead: float
    bandwidth: float


def ring_seconds(nbytes: float, size: int, link: Link) -> float:
    """Time of the ring all-reduce.

    Args:
        nbytes: bytes of the whole gradient as it travels in one direction.
        size: number of ranks n.
        link: the measured numbers.
    """
    return 2 * (size - 1) * (link.latency + nbytes / size / link.bandwidth)


def butterfly_seconds(nbytes: float, size: int, link: Link) -> float:
    """Time of the butterfly all-reduce; arguments as for `ring_seconds`."""
    power = 1 << (size.bit_length() - 1)
    seconds = 2 * (power.bit_length() - 1) * link.latency + 2 * (1 - 1 / power) * nbytes / link.bandwidth
    return seconds if size == power else seconds + 2 * (link.latency + nbytes / link.bandwidth)


def direct_seconds(nbytes: float, size: int, link: Link) -> float:
    """Time of the direct all-reduce; arguments as for `ring_seconds`."""
    if size == 1:
        return 0.0
    return 2 * (link.latency + (size - 2) * link.overhead + (1 - 1 / size) * nbytes / link.bandwidth)


SECONDS: dict[ScheduleFunction, Callable[[float, int, Link], float]] = {
    # In the order of preference where times are equal: the fewer requantisations, the smaller the error.
    direct: direct_seconds,
    butterfly: butterfly_seconds,
    ring: ring_seconds,
}


def choose(nbytes: float, size: int, link: Link) -> ScheduleFunction:
    """The schedule that the model finds fastest, or the more accurate one of those within 2 %.

    Args:
        nbytes: bytes of the whole gradient as it travels in one direction; the same on every rank.
        size: number of ranks n.
        link: the measured numbers; the same on every rank, as `measure` returns them.

    Raises:
        ValueError: a number out of range.
    """
    if size < 1 or nbytes < 0 or not (link.latency >= 0 and link.overhead >= 0 and link.bandwidth > 0):
        raise ValueError(
            f"no choice for {nbytes} bytes, {size} ranks, {link}; allowed: at least 1 rank, nothing negative, and a "
            "bandwidth above 0"
        )
    seconds = {schedule: model(nbytes, size, link) for schedule, model in SECONDS.items()}
    limit = 1.02 * min(seconds.values())
    return next(schedule for schedule, time_ in seconds.items() if time_ <= limit)


def explain(sizes: Sequence[float], ranks: int, link: Link) -> str:
    """A table of the model's times, and of what `choose` makes of them.

    Args:
        sizes: bytes of the whole gradient as it travels in one direction.
        ranks: number of ranks n.
        link: the measured numbers.
    """
    latency, overhead = (f"{seconds * 1e6:.0f} us" for seconds in link[:2])
    lines = [
        f"{ranks} ranks, latency {latency}, {overhead} per further message, {link.bandwidth / 1e6:.0f} MB/s",
        "        bytes" + "".join(f"{schedule.__name__:>12}" for schedule in SECONDS) + "  chosen",
    ]
    for nbytes in sizes:
        times = "".join(f"{model(nbytes, ranks, link) * 1e3:>9.3f} ms" for model in SECONDS.values())
        lines.append(f"{nbytes:>13,.0f}{times}  {choose(nbytes, ranks, link).__name__}")
    return "\n".join(lines)


def measure(transport: Transport, *, device: torch.device | str = "cpu", repeats: int = 10) -> Link:
    """Measure the three numbers in rings of messages; collective, a fraction of a second on a fast network.

    Args:
        transport: what to measure.
        device: where its messages live.
        repeats: how often; the least disturbed time counts.

    Returns:
        The numbers of the slowest rank, the same on every rank.

    Raises:
        TransportError: a peer did not take part.
    """
    if transport.size == 1:
        return Link(0.0, 0.0, float("inf"))
    burst, large = 17, 1 << 22
    small = _seconds(transport, 1, 64, device, repeats)
    many = _seconds(transport, burst, 64, device, repeats)
    full = _seconds(transport, 1, large, device, repeats)
    own = struct.pack("<3d", small, max(0.0, many - small) / (burst - 1), large / full)
    found = [struct.unpack("<3d", record) for record in gather_records(transport, own, len(own), device=device)]
    latencies, overheads, bandwidths = zip(*found, strict=True)
    return Link(max(latencies), max(overheads), min(bandwidths))


def _seconds(transport: Transport, messages: int, nbytes: int, device: torch.device | str, repeats: int) -> float:
    """Least time in which every rank passes so many messages on to the next one."""
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends: list[Message] = [(after, torch.zeros(nbytes, dtype=torch.uint8, device=device)) for _ in range(messages)]
    recvs: list[Message] = [(before, torch.empty_like(tensor)) for _, tensor in sends]
    times = []
    for _ in range(repeats + 1):  # one right after the other, as the steps of a schedule are
        started = time.perf_counter()
        transport.exchange(sends, recvs).wait()
        if recvs[0][1].is_cuda:
            torch.cuda.current_stream(recvs[0][1].device).synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])  # the first one pays for connections
