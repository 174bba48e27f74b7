"""Before they send messages to each other, ranks make sure that they are about to do the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynamiq_transport import Transport, gather_records

from .errors import ConfigMismatchError

DIGEST = 16
"""Bytes that every exchange of the comparison sends."""

RECORD = 4096
"""Bytes of the full record, which only travels when the digests differ."""

PROBLEM = "problem"
"""The fact that a rank has instead of all others if it cannot do what is asked of it."""

_LONGEST = 400
_NOTHING = "nothing"


def agree(transport: Transport, facts: Mapping[str, object], *, device: torch.device) -> None:
    """Compare facts over all ranks, with messages of fixed size whatever they are.

    A digest travels first, in ceil(log2 n) exchanges of 16 bytes. Only if there is a difference do the facts
    themselves follow. On CUDA the host waits for the answer.

    Args:
        transport: to all ranks, each of which calls this.
        facts: what has to be equal, by name, as something with a readable ``str``.
        device: where the transport's messages live.

    Raises:
        ConfigMismatchError: they differ; raised on every rank, with the same text.
        TransportError: a rank did not take part.
    """
    if transport.size == 1:
        return
    texts = {name: _clip(str(fact)) for name, fact in facts.items()}
    record = json.dumps(texts).encode()
    if not _equal_everywhere(transport, hashlib.blake2b(record, digest_size=DIGEST).digest(), device):
        records = gather_records(transport, record, RECORD, device=device)
        raise mismatch([json.loads(entry) for entry in records])


def _equal_everywhere(transport: Transport, digest: bytes, device: torch.device) -> bool:
    """Whether all digests are equal: the same answer on every rank.

    After k exchanges a rank's token is its digest if the 2**k ranks that end with it agree, and zero otherwise.
    """
    rank, size = transport.rank, transport.size
    token = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    distance = 1
    while distance < size:
        theirs = torch.empty_like(token)
        transport.exchange([((rank + distance) % size, token)], [((rank - distance) % size, theirs)]).wait()
        token = _same_or_zero(token, theirs)
        distance *= 2
    return bool(token.any())


def _same_or_zero(mine: Tensor, theirs: Tensor) -> Tensor:
    return mine * (mine == theirs).all()


def _clip(text: str) -> str:
    """Keep the record short, without letting long texts that differ become equal."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 20]}... {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def mismatch(records: Sequence[Mapping[str, str]]) -> ConfigMismatchError:
    """The error that says who holds what, given what each rank holds; problems come first."""
    names = dict.fromkeys([PROBLEM, *(name for record in records for name in record)])
    held = {name: tuple(record.get(name, _NOTHING) for record in records) for name in names}
    sound = [rank for rank, record in enumerate(records) if PROBLEM not in record]  # the others hold nothing else
    differences = {
        name: values
        for name, values in held.items()
        if len(set(values if name == PROBLEM else [values[rank] for rank in sound])) > 1
    }
    lines = []
    for name, values in differences.items():
        said = [value for value in dict.fromkeys(values) if name != PROBLEM or value != _NOTHING]
        groups = [f"{value} on {_ranks(values, value)}" for value in said]
        lines.append(f"  {name}: {'; '.join(groups)}")
    return ConfigMismatchError("\n".join(["the ranks disagree; nothing was changed", *lines]), differences)


def _ranks(values: tuple[str, ...], value: str) -> str:
    ranks = [rank for rank, held in enumerate(values) if held == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
