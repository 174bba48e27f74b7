"""A small all-gather of records, for what the ranks must agree on before they exchange messages."""

from __future__ import annotations

import torch

from dynamiq_transport.transport import Transport

_LENGTH = 4


def gather_records(
    transport: Transport, record: bytes, size: int, *, device: torch.device | str = "cpu"
) -> list[bytes]:
    """Give every rank the record of every rank.

    Each step doubles the number of records that a rank holds (dissemination; Bruck et al. 1997), so there are
    ceil(log2(ranks)) exchanges, and every rank takes part in each of them.

    Args:
        transport: how the bytes travel.
        record: this rank's bytes, at most ``size`` of them.
        size: the greatest length of a record; the same on every rank.
        device: where the transport's messages live.

    Returns:
        The record of each rank, in rank order; the same list on every rank.

    Raises:
        ValueError: the record is longer than ``size``.
        TransportError: a peer did not take part.
    """
    if len(record) > size:
        raise ValueError(f"a record of {len(record)} bytes does not fit; allowed: at most {size}")
    row = len(record).to_bytes(_LENGTH, "little") + record.ljust(size, b"\0")
    rank, ranks = transport.rank, transport.size
    rows = torch.empty(ranks, len(row), dtype=torch.uint8, device=device)  # row i is of rank (rank + i) mod ranks
    rows[0] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    held = 1
    while held < ranks:
        count = min(held, ranks - held)
        send = ((rank - held) % ranks, rows[:count])
        recv = ((rank + held) % ranks, rows[held : held + count])
        transport.exchange([send], [recv]).wait()
        held += count
    found = rows.roll(rank, dims=0).cpu()
    return [_unpack(found[i].numpy().tobytes()) for i in range(ranks)]


def _unpack(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH], "little")
    return row[_LENGTH : _LENGTH + length]
