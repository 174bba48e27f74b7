"""Messages with headers, laid out so that neighbouring chunks travel as one piece without being copied.

A frame is a 16-byte header and a chunk's message:

    0   2 bytes   magic "DQ"
    2   1 byte    version of the framing
    3   1 byte    1 statistics, 2 gradient, 3 inside a node; plus 128 when the sender has itself received a wrong header
    4   2 bytes   chunk
    6   2 bytes   slot
    8   4 bytes   bucket
    12  4 bytes   step

Numbers are little-endian, and bucket and step modulo 2**32. Frames in one piece start at multiples of ``align``
bytes; the few bytes between two frames mean nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HEADER = 16
"""Bytes of a header."""

VERSION = 1
"""Of the framing; part of what the ranks agree on."""

_LAYOUT = struct.Struct("<2sBBHHII")
_KIND_AT = 3
_FAULT = 128


class Header(NamedTuple):
    """What a header says.

    Attributes:
        kind: `STATISTICS`, `GRADIENT` or `NODE`.
        chunk: which chunk the message is of.
        slot: under which it was encoded: the rank that encoded it.
        bucket: of the all-reduce.
        step: of the all-reduce.
    """

    kind: int
    chunk: int
    slot: int
    bucket: int
    step: int

    def pack(self) -> bytes:
        """The 16 bytes."""
        return _LAYOUT.pack(
            b"DQ", VERSION, self.kind, self.chunk, self.slot, self.bucket % (1 << 32), self.step % (1 << 32)
        )


STATISTICS = 1
GRADIENT = 2
NODE = 3


class Frames:
    """Room for one framed message per chunk, in one buffer.

    Args:
        sizes: bytes of each message, without its header.
        device: where the buffer lives.
        align: frames start at multiples of this.
        buffer: uint8, laid out like this already; a new one when None.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, *, align: int, buffer: Tensor | None = None) -> None:
        self._sizes = sizes
        self._starts = []
        self._align = align
        end = 0
        for size in sizes:
            start = -(-end // align) * align
            self._starts.append(start)
            end = start + HEADER + size
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device) if buffer is None else buffer

    def header(self, chunk: int) -> Tensor:
        """uint8 [16]."""
        start = self._starts[chunk]
        return self.buffer[start : start + HEADER]

    def message(self, chunk: int) -> Tensor:
        """uint8 [sizes[chunk]]."""
        start = self._starts[chunk] + HEADER
        return self.buffer[start : start + self._sizes[chunk]]

    def room_for(self, chunks: Sequence[int], buffer: Tensor | None = None) -> Frames:
        """Room for some of the chunks, in the order given and laid out as `piece` lays them out."""
        sizes = [self._sizes[chunk] for chunk in chunks]
        return Frames(sizes, self.buffer.device, align=self._align, buffer=buffer)

    def piece(self, chunks: Sequence[int]) -> Tensor:
        """The frames of some chunks as one contiguous piece: a view where they are neighbours, otherwise a copy."""
        view = self._view(chunks)
        if view is not None:
            return view
        room = self.room_for(chunks)
        for i, chunk in enumerate(chunks):
            room.header(i).copy_(self.header(chunk))
            room.message(i).copy_(self.message(chunk))
        return room.buffer

    def landing(self, chunks: Sequence[int]) -> Tensor:
        """Where a piece with some chunks can be received: a view of their places if they are neighbours."""
        view = self._view(chunks)
        return self.room_for(chunks).buffer if view is None else view

    def settle(self, chunks: Sequence[int], landed: Tensor) -> None:
        """Bring the frames of a piece that was received into their places, if they are not there already."""
        if self._view(chunks) is not None:
            return
        room = self.room_for(chunks, landed)
        for i, chunk in enumerate(chunks):
            self.header(chunk).copy_(room.header(i))
            self.message(chunk).copy_(room.message(i))

    def _view(self, chunks: Sequence[int]) -> Tensor | None:
        if not chunks or list(chunks) != list(range(chunks[0], chunks[0] + len(chunks))):
            return None
        last = chunks[-1]
        return self.buffer[self._starts[chunks[0]] : self._starts[last] + HEADER + self._sizes[last]]


class Seal:
    """Writes headers, and compares those that arrive with what they should be, without reading them on the host.

    A rank that has seen a wrong header says so in the headers that it writes from then on, so that all ranks learn
    of it while the messages still flow as planned: nobody is left waiting.

    Args:
        device: where the headers live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Header, Tensor] = {}
        self._arrived: list[tuple[int, Header, Tensor]] = []
        self._compared = 0
        self._fault: Tensor | None = None  # uint8 [], _FAULT if any header so far was wrong

    def prepare(self, headers: Sequence[Header]) -> None:
        """Bring the headers that are going to be written and expected to the device, all in one piece."""
        raw = torch.frombuffer(bytearray(b"".join(header.pack() for header in headers)), dtype=torch.uint8)
        if self._device.type == "cuda":
            raw = raw.pin_memory()  # of other memory a copy may make the host wait for the stream
        rows = raw.to(self._device, non_blocking=True).view(-1, HEADER)
        self._known.update(zip(headers, rows.unbind(), strict=True))

    def write(self, header: Header, out: Tensor) -> None:
        """Write a header that was prepared into uint8 [16]."""
        out.copy_(self._known[header])
        if self._fault is not None:
            out[_KIND_AT].bitwise_or_(self._fault)

    def expect(self, peer: int, header: Header, arrived: Tensor) -> None:
        """Note that ``arrived``, uint8 [16], came from ``peer`` and should be ``header``, which was prepared."""
        self._arrived.append((peer, header, arrived.clone()))

    def compare(self) -> None:
        """Compare everything noted since the last time."""
        new = self._arrived[self._compared :]
        self._compared = len(self._arrived)
        if new:
            found, expected = (
                torch.stack(rows) for rows in zip(*((f, self._known[h]) for _, h, f in new), strict=True)
            )
            fault = (found != expected).any().to(torch.uint8) * _FAULT
            self._fault = fault if self._fault is None else fault | self._fault

    def wrong(self) -> Tensor:
        """Whether any header so far was wrong: bool []; the only thing that depends on the device's values."""
        return torch.zeros((), dtype=torch.bool, device=self._device) if self._fault is None else self._fault > 0

    def describe(self) -> tuple[str, tuple[int, ...]]:
        """What was wrong, in words, and which peers sent it; those who only passed the word on if there are no others.

        Reads the headers on the host.
        """
        faults = [(peer, header, _raw(found)) for peer, header, found in self._arrived]
        faults = [(peer, header, raw) for peer, header, raw in faults if raw != header.pack()]
        faults = [fault for fault in faults if not _only_passed_on(*fault[1:])] or faults
        said = [f"rank {peer} sent {_differences(header, raw)}" for peer, header, raw in faults]
        return "; ".join(said[:3]), tuple(sorted({peer for peer, _, _ in faults}))


def _raw(header: Tensor) -> bytes:
    return header.cpu().numpy().tobytes()


def _only_passed_on(expected: Header, raw: bytes) -> bool:
    """Whether a header is right but for the word that its sender has received a wrong one."""
    honest = bytearray(raw)
    honest[_KIND_AT] &= ~_FAULT
    return honest == expected.pack()


def _differences(expected: Header, raw: bytes) -> str:
    magic, version, kind, *rest = _LAYOUT.unpack(raw)
    if magic != b"DQ" or version != VERSION:
        return f"something that is no frame of version {VERSION} (it begins with {raw[:4].hex(' ')})"
    wanted = _LAYOUT.unpack(expected.pack())[2:]
    found = (kind & ~_FAULT, *rest)
    names = Header._fields
    wrong = [f"{name} {f} instead of {w}" for name, f, w in zip(names, found, wanted, strict=True) if f != w]
    if kind & _FAULT:
        wrong.append("word that it had received a wrong header")
    return f"for chunk {expected.chunk} " + ", ".join(wrong)
