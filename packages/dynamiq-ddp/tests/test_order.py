"""What NCCL asks of its callers, which needs no GPU to be seen: whole batches, in one order, over buffers that stay."""

import gc
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn

from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, all_reduce, dynamiq_hook
from dynamiq_ddp.frames import HEADER
from dynamiq_transport import Handle, LocalTransport, TorchTransport, Transport, batch

BATCHES = {"ring": 2 * 3, "butterfly": 2 * 2, "direct": 2, "hierarchical:2": 2 + 2}
"""Of an all-reduce on four ranks without statistics."""


class Watched(Transport):
    """Another transport; keeps count of the batches, and of what is alive while they are in flight."""

    def __init__(self, transport, *, collect=False):
        self.rank, self.size, self.collect = transport.rank, transport.size, collect
        self.posted, self.waited = 0, 0
        self.batches = []  # (kind, bucket, step) of the first frame, and the peers
        self._transport = transport

    def exchange(self, sends, recvs):
        if all(tensor.numel() > HEADER for _, tensor in sends):
            first = bytes(sends[0][1][:HEADER].tolist()) if sends else b""
            self.batches.append((first[3:4] + first[8:16], len(sends), len(recvs)))
        self.posted += 1
        return Whole(self, self._transport.exchange(sends, recvs), [*sends, *recvs])

    def close(self):
        self._transport.close()

    def abort(self):
        self._transport.abort()


class Whole(Handle):
    """Holds buffers by weak references only: they have to be kept alive by whoever waits, or by the transport."""

    def __init__(self, watched, handle, messages):
        self._watched, self._handle = watched, handle
        self._buffers = [weakref.ref(tensor) for _, tensor in messages]

    def wait(self):
        if self._watched.collect:
            gc.collect()
        assert all(buffer() is not None for buffer in self._buffers)
        self._handle.wait()
        self._watched.waited += 1


@pytest.mark.parametrize("schedule", BATCHES)
def test_every_step_is_one_batch_with_its_sends_and_receives(schedule, ranks):
    def work(transport):
        watched = Watched(transport, collect=transport.rank == 0 and schedule != "ring")
        all_reduce(torch.ones(400), transport=watched, codec=BF16(), schedule=schedule, check=False)
        return [(sends, recvs) for _, sends, recvs in watched.batches]

    for batches in ranks(4, work):
        assert len(batches) == BATCHES[schedule]
        assert all(sends == recvs >= 1 for sends, recvs in batches)


class WatchedAhead(Watched):
    posts_ahead = True


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
def test_receives_are_posted_a_step_ahead_where_the_transport_allows_it(schedule, ranks):
    def work(transport, kind):
        watched = kind(transport)
        x = torch.randn(5000, generator=torch.Generator().manual_seed(transport.rank))
        all_reduce(x, transport=watched, codec=BF16(), schedule=schedule, check=False)
        return x, [(sends > 0, recvs > 0) for _, sends, recvs in watched.batches]

    expected = ranks(4, lambda transport: work(transport, Watched))
    for (x, batches), (plain, _) in zip(ranks(4, lambda t: work(t, WatchedAhead)), expected, strict=True):
        assert torch.equal(x, plain)
        later = BATCHES[schedule] - 1
        assert batches == [(True, True), *[(False, True), (True, False)] * later]


class Apart(Transport):
    """Another transport; refuses to receive into memory of a message that nobody has waited for yet."""

    posts_ahead = True

    def __init__(self, transport):
        self.rank, self.size = transport.rank, transport.size
        self.in_flight = {}  # (first byte, behind the last one) of sends and of receives, by handle
        self._transport = transport

    def exchange(self, sends, recvs):
        handle = ApartHandle(self, self._transport.exchange(sends, recvs))
        self.in_flight[handle] = spans(sends), spans(recvs)
        sent, received = ([span for both in self.in_flight.values() for span in both[i]] for i in range(2))
        for i, (begin, end) in enumerate(received):
            others = sent + received[:i]
            assert not any(begin < behind and start < end for start, behind in others), "memory in use twice"
        return handle

    def close(self):
        self._transport.close()

    def abort(self):
        self._transport.abort()


class ApartHandle(Handle):
    def __init__(self, apart, handle):
        self._apart, self._handle = apart, handle

    def wait(self):
        self._handle.wait()
        self._apart.in_flight.pop(self, None)


def spans(messages):
    return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for _, tensor in messages]


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_nothing_is_received_into_memory_that_is_still_in_use(n, schedule, codec, ranks):
    """A finished chunk comes back to where it was sent from as a partial sum; a transport may need it unchanged."""

    def work(transport):
        return all_reduce(torch.ones(5000), transport=Apart(transport), codec=codec, schedule=schedule)

    for mean in ranks(n, work):
        assert isinstance(mean, torch.Tensor), mean


@pytest.mark.parametrize("settings", [{}, {"error_feedback": True}, {"measure_every": 1}, {"bits": 8.0}], ids=str)
@pytest.mark.parametrize("schedule", BATCHES)
def test_nothing_is_in_flight_when_the_mean_is_there(schedule, settings, ranks):
    """A process may end then: what it has not waited for would never reach its peers."""
    groups = LocalTransport.group(4)

    def work(outer):
        transport = Watched(groups[outer.rank])
        settings_here = {"schedule": schedule, "lanes": 1, "min_compress_numel": 0, **settings}
        state = DynamiQState(backend="numba", transport=lambda: transport, **settings_here)
        counts = []
        for step in range(3):
            if step == 2 and "bits" in settings:
                state.bits = 4.0  # so that the ranks compare them
            for bucket in range(2):
                state.begin(torch.ones(400), index=bucket).wait()
                counts.append((transport.posted, transport.waited))
        return counts

    for counts in ranks(4, work):
        assert len({posted for posted, _ in counts}) == 6
        assert all(posted == waited for posted, waited in counts)


def layers():
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def train(group, schedule, steps=3):
    """Gradients after some backward passes over a bucket for every layer."""
    transports = []

    def make():
        transports.append(Watched(TorchTransport.dedicated(group, timeout=60.0)))
        return transports[-1]

    ddp = nn.parallel.DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=0.001)
    state = DynamiQState(codec=BF16(), min_compress_numel=0, schedule=schedule, transport=make)
    ddp.register_comm_hook(state, dynamiq_hook)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.full((1, 16), group.rank() + 1.0)).sum().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
    state.close()
    return gradients, [transport.batches for transport in transports]


@pytest.mark.parametrize("schedule", ["ring", "hierarchical:2"])
def test_lanes_post_their_batches_in_one_order_on_all_ranks(schedule, ddp_ranks):
    """For every lane the same buckets and steps in the same order, whatever the lanes do relative to each other."""
    lanes = defaultdict(set)
    for _, batches in ddp_ranks(4, lambda group: train(group, schedule)):
        for lane, posted in enumerate(batches):
            lanes[lane].add(tuple(posted))
    assert sorted(lanes) == [0, 1]
    for orders in lanes.values():
        assert len(orders) == 1
        assert len(next(iter(orders))) > 3 * BATCHES[schedule]


@pytest.mark.parametrize("schedule", BATCHES)
def test_gradients_do_not_hang_on_tags(schedule, ddp_ranks, monkeypatch):
    """NCCL has none: with equal ones, several buckets and messages are told apart by their order alone."""
    expected = ddp_ranks(4, lambda group: train(group, schedule))[0][0]
    monkeypatch.setattr(batch, "TAGS", 1)
    for gradients, _ in ddp_ranks(4, lambda group: train(group, schedule)):
        assert torch.equal(gradients, expected)
