"""A comparison that costs no time: ranks send tokens of what they are about to do along with their first messages.

`agreement.agree` makes sure before anything is sent, and so it takes rounds of messages of its own. Once the ranks have
agreed, they repeat the comparison in every step, since a setting may have been changed on one of them alone. Each rank
sends every other one a token of fixed size, and posts its first messages at the same time. It waits for the tokens
first: where they differ, the messages behind them may be of sizes that nobody expects, and would only be missed after
the timeout. As every rank sees the tokens of all, every rank raises.

On CUDA the host does not look at messages, so this is for ranks whose messages are on CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch

from dynamiq_transport import Handle, Message, Transport, TransportError

from .agreement import PROBLEM, mismatch
from .errors import ConfigMismatchError

_WHOLE = 4
"""Bytes of a token that are of all facts together, and decide. One byte for each fact follows, to say what differs. A
token of zeros says that its rank cannot do what is asked of it."""


class ComparingTransport(Transport):
    """Another transport, over which the ranks compare facts during the first exchange.

    Args:
        transport: to all ranks, each of which does the same; its messages are on CPU.
        facts: what has to be equal, by names that are the same on all ranks.
        count: is told how many bytes the comparison sends.
        agreed: called when it has found no difference.
        problem: why this rank cannot do what is asked of it; then only the names of the facts count.
    """

    def __init__(
        self,
        transport: Transport,
        facts: Mapping[str, object],
        count: Callable[[int], None],
        agreed: Callable[[], None],
        *,
        problem: object = None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.posts_ahead = transport.posts_ahead
        self._count = count
        self._agreed = agreed
        self._problem = problem
        self._transport = transport
        self._facts = {name: str(fact) for name, fact in facts.items()}
        self._comparison: Handle | None = None

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        first = self._comparison is None
        comparison = self._comparison or self.compare()
        try:
            messages = self._transport.exchange(sends, recvs)
        except TransportError:
            comparison.wait()  # a peer may be gone because of what the tokens say, which have arrived then
            raise
        return _Both(comparison, messages) if first else messages

    def compare(self) -> Handle:
        """Post the tokens alone; whoever waits for the handle gets the error."""
        texts = list(self._facts.values())
        mine = _digest(repr(texts), _WHOLE) + b"".join(_digest(text, 1) for text in texts)
        if self._problem is not None:
            mine = bytes(len(mine))
        tokens = torch.empty(self.size, len(mine), dtype=torch.uint8)
        tokens[self.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        handle = self._transport.exchange(
            [(peer, tokens[self.rank]) for peer in peers], [(peer, tokens[peer]) for peer in peers]
        )
        self._count(len(peers) * len(mine))
        self._comparison = _Comparison(handle, tokens, self.rank, self._facts, self._agreed, str(self._problem))
        return self._comparison

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class _Comparison(Handle):
    """Tokens on their way: uint8 [n, bytes], of which this rank's row is there already."""

    def __init__(
        self,
        handle: Handle,
        tokens: torch.Tensor,
        rank: int,
        facts: Mapping[str, str],
        agreed: Callable[[], None],
        problem: str,
    ) -> None:
        self._handle, self._tokens, self._rank, self._facts, self._agreed = handle, tokens, rank, facts, agreed
        self._problem = problem

    def wait(self) -> None:
        self._handle.wait()
        if not torch.equal(self._tokens, self._tokens[self._rank].expand_as(self._tokens)):
            raise self._mismatch()
        self._agreed()

    def _mismatch(self) -> ConfigMismatchError:
        rows = self._tokens.tolist()
        said = [row[_WHOLE:] for row in rows]
        sound = [numbers for row, numbers in zip(rows, said, strict=True) if any(row)]
        if all(numbers == sound[0] for numbers in sound):  # perhaps by chance: one in 256 for each fact that differs
            said = [[int.from_bytes(bytes(row[:_WHOLE]), "little")] * len(self._facts) for row in rows]
        records = []
        for rank, numbers in enumerate(said):
            if any(rows[rank]):
                pairs = zip(self._facts.items(), numbers, said[self._rank], strict=True)
                records.append({name: _told(text, number, own) for (name, text), number, own in pairs})
            else:
                records.append({PROBLEM: self._problem if rank == self._rank else "an error of its own, raised there,"})
        return mismatch(records)


class _Both(Handle):
    """Tokens, and the messages that were posted behind them."""

    def __init__(self, comparison: Handle, messages: Handle) -> None:
        self._comparison, self._messages = comparison, messages

    def wait(self) -> None:
        self._comparison.wait()
        self._messages.wait()


def _told(text: str, number: int, own: int) -> str:
    return text if number == own else f"something else ({number & 0xFF:02x})"


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
