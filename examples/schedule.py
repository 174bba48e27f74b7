"""A schedule of one's own, over a transport that counts: the codec knows neither.

    python examples/schedule.py

Needs dynamiq-ddp. The ranks are threads; TorchTransport or MPITransport take the place of theirs between machines.
"""

from collections.abc import Sequence

import torch

from dynamiq_core import DynamiQ, vnmse
from dynamiq_ddp import all_reduce
from dynamiq_transport import Handle, Message, Schedule, Step, Transport, run_local

RANKS = 4
D = 100_000


def star(rank: int, size: int) -> Schedule:
    """Everything goes to rank 0, which adds up and tells the others."""
    others, whole = range(1, size), (0,)
    if rank == 0:
        gather, scatter = Step(recvs=tuple((r, whole) for r in others)), Step(sends=tuple((r, whole) for r in others))
    else:
        gather, scatter = Step(sends=((0, whole),)), Step(recvs=((0, whole),))
    owned = whole if rank == 0 else ()
    return Schedule(name="star", rank=rank, size=size, chunks=1, owned=owned, reduce=(gather,), gather=(scatter,))


class Counting(Transport):
    """Another transport, and how many bytes it was given."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.size, self.inner, self.sent = inner.rank, inner.size, inner, 0

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        self.sent += sum(tensor.numel() for _, tensor in sends)
        return self.inner.exchange(sends, recvs)

    def close(self) -> None:
        self.inner.close()


gradients = torch.randn(RANKS, D, generator=torch.Generator().manual_seed(0))
for schedule in ("ring", "butterfly", "direct", star):

    def work(transport: Transport, schedule=schedule):
        counting = Counting(transport)
        own = gradients[transport.rank].clone()
        return all_reduce(own, transport=counting, codec=DynamiQ(), schedule=schedule), counting.sent

    means, sent = zip(*run_local(RANKS, work), strict=True)
    assert all(torch.equal(mean, means[0]) for mean in means)
    name = schedule if isinstance(schedule, str) else schedule.__name__
    print(f"{name:9} vNMSE {vnmse(means[0], gradients.mean(dim=0)):.1e}, bytes sent by each rank: {list(sent)}")
