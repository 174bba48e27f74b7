"""What is particular to torch.distributed: tags, groups, batches, and the calls that NCCL will see."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dynamiq_transport import (
    ScheduleFunction,
    TorchTransport,
    Transport,
    TransportError,
    batch,
    butterfly,
    dedicated_group,
    direct,
    ring,
    run_local,
)
from dynamiq_transport.conformance import (
    all_to_all,
    blank,
    check,
    payload,
    several_per_peer,
    some_ranks_only,
    sum_by_schedule,
)

Threads = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [2, 4])
def test_results_do_not_hang_on_tags(torch_threads: Threads, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """NCCL has no tags: with all of them equal, order alone must match several messages per peer and batch."""
    monkeypatch.setattr(batch, "TAGS", 1)

    def work(transport: Transport) -> None:
        for _ in range(3):
            several_per_peer(transport, "cpu")
            all_to_all(transport, "cpu")

    torch_threads(size, work)


def test_collective_of_the_user_on_the_same_group_may_be_pending(gloo_threads: Threads) -> None:
    def work(group: dist.ProcessGroup) -> None:
        total = torch.full((100_000,), float(group.rank()))
        pending = group.allreduce([total])
        with TorchTransport(group, timeout=60.0) as transport:
            several_per_peer(transport, "cpu")
            pending.wait()
        assert torch.equal(total, torch.full((100_000,), 3.0))

    gloo_threads(3, work)


def test_lanes_may_be_used_in_any_order(gloo_threads: Threads) -> None:
    """Two transports over the same ranks: each has its own order, and the waits cross over."""

    def work(group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        after, before = (rank + 1) % size, (rank - 1) % size
        with TorchTransport.dedicated(group, timeout=60.0) as one, TorchTransport.dedicated(group, timeout=60.0) as two:
            found = [blank(1000, "cpu") for _ in range(6)]
            lanes = [one, two] * 3 if rank % 2 else [one] * 3 + [two] * 3
            order = [0, 3, 1, 4, 2, 5] if rank % 2 else [0, 1, 2, 3, 4, 5]
            handles = [
                lane.exchange([(after, payload(1000, rank, after, k))], [(before, found[k])])
                for lane, k in zip(lanes, order, strict=True)
            ]
            for handle in reversed(handles):
                handle.wait()
            for k, buffer in enumerate(found):
                check(buffer, before, rank, k)

    gloo_threads(3, work)


@pytest.mark.parametrize(
    ("schedule", "size", "batches", "messages"),
    [(ring, 5, 8, 8), (butterfly, 8, 6, 6), (direct, 5, 2, 8), (ring, 1, 0, 0), (butterfly, 1, 0, 0)],
)
def test_every_step_is_one_batch(
    torch_threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
    schedule: ScheduleFunction,
    size: int,
    batches: int,
    messages: int,
) -> None:
    """2 (n - 1) batches per ring, 2 log2 n per butterfly, each posted whole, with sends and receives together."""
    posted: dict[int, list[list[str]]] = {rank: [] for rank in range(size)}
    batch = dist.batch_isend_irecv

    def recorded(operations: list[dist.P2POp]) -> list[dist.Work]:
        assert operations[0].group is not None
        posted[operations[0].group.rank()].append([operation.op.__name__ for operation in operations])
        return batch(operations)

    def work(transport: Transport) -> None:  # one message for all the chunks of a transfer
        plan = schedule(transport.rank, size)
        for step in (*plan.reduce, *plan.gather):
            sends, recvs = ([(peer, blank(40, "cpu")) for peer, _ in side] for side in step)
            transport.exchange(sends, recvs).wait()

    monkeypatch.setattr(dist, "batch_isend_irecv", recorded)
    torch_threads(size, work)
    for calls in posted.values():
        assert len(calls) == batches
        assert all("isend" in names and "irecv" in names for names in calls)
        assert sum(names.count("isend") for names in calls) == messages


class _NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on any operation that needs a value of a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("local_scalar", "nonzero", "item", "masked_select", "unique")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("launch", [run_local, "torch"], ids=["local", "torch"])
def test_no_value_is_read_on_the_host(launch: Any, torch_threads: Threads) -> None:
    def work(transport: Transport) -> None:
        peer = 1 - transport.rank
        sent, found = blank(100, "cpu"), blank(100, "cpu")
        with _NoHostReads():  # type: ignore[no-untyped-call]
            transport.exchange([(peer, sent), (peer, sent[:0])], [(peer, found), (peer, found[:0])]).wait()

    (torch_threads if launch == "torch" else launch)(2, work, timeout=30.0)


class _Work:
    """A pending CUDA operation, as far as the transport looks at it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait(self, *timeout: object) -> None:
        self.log.append(f"wait{timeout}")


class _Group(dist.ProcessGroup):
    """A group of which only the calls are recorded."""

    log: list[str]

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work:  # type: ignore[override]
        self.log.append(f"allreduce on {tensors[0].device}")
        return _Work(self.log)


def test_calls_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks meet once before the first batch, each exchange is one batch, and a wait never blocks the host."""
    group = _Group(1, 4)  # type: ignore[call-arg]
    group.log = []

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        group.log.append(" ".join(f"{operation.op.__name__} {operation.group_peer}" for operation in operations))
        return [_Work(group.log)]  # one for all, as NCCL does it

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for size in (8, 0, 9)]
        transport = TorchTransport(group, timeout=5.0)
        first = transport.exchange([(2, device[0]), (3, device[1])], [(0, device[2])])
        second = transport.exchange([(2, device[2])], [])
        transport.exchange([(3, device[1])], []).wait()
        first.wait()
        second.wait()
        mixed = [(2, device[0]), (3, torch.empty(8, dtype=torch.uint8))]
        with pytest.raises(ValueError, match="mix devices: cpu, cuda:0"):
            transport.exchange(mixed, [])
    assert group.log == ["allreduce on cuda:0", "wait()", "irecv 0 isend 2", "isend 2", "wait()", "wait()"]


def test_receives_go_ahead_with_gloo_and_not_without_it(gloo_threads: Threads) -> None:
    assert gloo_threads(2, lambda group: TorchTransport(group, timeout=5.0).posts_ahead) == [True, True]
    assert not TorchTransport(_Group(1, 4), timeout=5.0).posts_ahead  # type: ignore[call-arg]


def test_a_batch_lets_go_of_the_group_when_the_transport_is_aborted(gloo_threads: Threads) -> None:
    """Whoever keeps the batch, as the traceback of an error does, would keep the sockets open, and peers waiting."""

    def work(group: dist.ProcessGroup) -> list[object]:
        transport = TorchTransport(group, timeout=60.0)
        handle: Any = transport.exchange([], [(1 - transport.rank, torch.empty(8, dtype=torch.uint8))])
        transport.abort()
        with pytest.raises(TransportError, match="failed before"):
            handle.wait()
        kept: list[object] = handle._parts
        return kept

    assert gloo_threads(2, work) == [[], []]


class _Counted:
    """Counts how often somebody waits for it."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.waits = work, 0

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)
        self.waits += 1


def test_every_work_of_a_batch_is_waited_for(torch_threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo returns one for each message, and nothing says which of them is the last to finish."""
    works: dict[int, list[_Counted]] = {rank: [] for rank in range(3)}
    batch = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[Any]:
        assert operations[0].group is not None
        made = [_Counted(work) for work in batch(operations)]
        works[operations[0].group.rank()] += made
        return made

    def work(transport: Transport) -> None:
        several_per_peer(transport, "cpu")
        before, after = (transport.rank - 1) % 3, (transport.rank + 1) % 3
        transport.exchange([(after, blank(9, "cpu"))], [(before, blank(9, "cpu"))])
        transport.close()  # which waits for what nobody has waited for

    monkeypatch.setattr(dist, "batch_isend_irecv", counted)
    torch_threads(3, work)
    for made in works.values():
        assert len(made) == 2 * 6 * 2 + 2  # six messages that are not empty to and from each of two peers
        assert all(each.waits == 1 for each in made)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between ranks needs two GPUs")
def test_nccl() -> None:
    """The first traffic of a new group is of some ranks only, then every pair speaks."""
    size = torch.cuda.device_count()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    torch.multiprocessing.spawn(_nccl_rank, (size, store.port), nprocs=size)  # type: ignore[attr-defined,no-untyped-call]


def _nccl_rank(rank: int, size: int, port: int) -> None:
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    with TorchTransport.dedicated(timeout=60.0) as transport:
        some_ranks_only(transport, device)
        several_per_peer(transport, device)
        for schedule in (ring, butterfly, direct):
            sum_by_schedule(transport, schedule, device)
    dist.destroy_process_group()


@pytest.mark.parametrize("moment", ["wait", "post"])
def test_only_the_lost_peer_is_named(gloo_threads: Threads, moment: str) -> None:
    """Rank 2 leaves; a batch with three peers must not blame the others."""
    posted, looked = threading.Barrier(4), threading.Barrier(3)

    def work(parent: dist.ProcessGroup) -> tuple[int, ...]:
        group = dedicated_group(parent, timeout=60.0)
        all_to_all(TorchTransport(group, timeout=60.0), "cpu")
        others = [peer for peer in range(4) if peer != parent.rank()]
        batch = [[(peer, blank(100, "cpu")) for peer in others] for _ in range(2)]
        if parent.rank() == 2:
            if moment == "wait":
                posted.wait(60.0)
            return (2,)
        if moment == "wait":
            handle = TorchTransport(group, timeout=60.0).exchange(*batch)
            posted.wait(60.0)
            with pytest.raises(TransportError) as caught:
                handle.wait()
        else:  # once a message has failed, a batch with that peer fails before it starts
            with pytest.raises(TransportError):
                TorchTransport(group, timeout=60.0).exchange([], [(2, blank(100, "cpu"))]).wait()
            with pytest.raises(TransportError) as caught:
                TorchTransport(group, timeout=60.0).exchange(*batch)
        looked.wait(60.0)  # nobody else leaves before all have looked
        return caught.value.peers

    assert gloo_threads(4, work) == [(2,)] * 4


@pytest.mark.parametrize("taken", [False, True], ids=["stuck", "taken"])
def test_a_send_that_is_stuck_beside_a_failed_receive_is_named(gloo_threads: Threads, taken: bool) -> None:
    """In batches of their own, as where receives are posted ahead; rank 3 may be waiting itself, and is not named."""
    sent, seen = threading.Barrier(2), threading.Barrier(4)

    def work(group: dist.ProcessGroup) -> tuple[int, ...]:
        lost: tuple[int, ...] = ()
        with TorchTransport.dedicated(group, timeout=60.0) as transport:
            all_to_all(transport, "cpu")
            if transport.rank == 0:
                receiving = transport.exchange([], [(2, blank(100, "cpu"))])
                transport.exchange([(1, blank(100, "cpu"))], [])
                transport.exchange([], [(3, blank(100, "cpu"))])
                sent.wait(60.0)
                transport.timeout = 1.0
                with pytest.raises(TransportError) as caught:
                    receiving.wait()
                lost = caught.value.peers
            elif transport.rank == 1:
                if taken:
                    transport.exchange([], [(0, blank(100, "cpu"))]).wait()
                sent.wait(60.0)
            seen.wait(60.0)
        return lost

    assert gloo_threads(4, work)[0] == ((2,) if taken else (1, 2))


def test_failed_group_ends_while_its_error_is_still_held(torch_threads: Threads) -> None:
    """Rank 2 leaves, so rank 1 fails; rank 0 hears of it from a closed connection, not from its own timeout."""
    heard = threading.Event()

    def work(transport: Transport) -> None:
        assert isinstance(transport, TorchTransport)
        if transport.rank == 0:
            with pytest.raises(TransportError) as caught:
                transport.exchange([], [(1, blank(7, "cpu"))]).wait()
            heard.set()
            assert "Timed out" not in str(caught.value)
        elif transport.rank == 1:
            with pytest.raises(TransportError) as caught:
                transport.exchange([(2, blank(5, "cpu"))], [(2, blank(5, "cpu"))]).wait()
            assert heard.wait(60.0)
            assert caught.value.peers == (2,)
        else:
            transport.abort()

    torch_threads(3, work, timeout=20.0)


def test_second_wait_of_a_failed_batch_fails_again(torch_threads: Threads) -> None:
    begun = threading.Event()

    def work(transport: Transport) -> None:
        if transport.rank == 1:
            begun.wait(60.0)  # with a rank that has left, a batch fails before it starts
        else:
            handle = transport.exchange([], [(1, blank(10, "cpu"))])
            begun.set()
            for _ in range(2):
                with pytest.raises(TransportError) as caught:
                    handle.wait()
                assert caught.value.peers == (1,)

    torch_threads(2, work, timeout=0.5)


def _resources() -> tuple[int, int]:
    """Open files and sockets, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_closing_ends_the_group_it_has_made(gloo_threads: Threads) -> None:
    """Sockets and threads go when the transport closes, and also when it has failed."""

    def work(group: dist.ProcessGroup) -> None:
        transport = TorchTransport.dedicated(group, timeout=20.0)
        all_to_all(transport, "cpu")
        if group.rank() == 0:
            transport.abort()
            return
        with pytest.raises(TransportError):
            transport.exchange([], [(0, blank(10, "cpu"))]).wait()

    gloo_threads(2, work)
    gc.collect()
    before = _resources()
    for _ in range(5):
        gloo_threads(2, work)
    deadline = time.monotonic() + 10.0
    while _resources() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the system takes a moment to bury a thread that has been joined
    assert _resources() == before


def test_group_given_by_the_user_stays(gloo_threads: Threads) -> None:
    def work(group: dist.ProcessGroup) -> None:
        for _ in range(2):
            with TorchTransport(group, timeout=20.0) as transport:
                all_to_all(transport, "cpu")

    gloo_threads(2, work)


def test_absent_rank_is_an_error_when_a_group_is_made() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)  # type: ignore[attr-defined]
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # type: ignore[attr-defined]
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with pytest.raises(TransportError, match=r"rank 0 of 2 could not make a gloo group within 0\.3 s"):
        dedicated_group(group, timeout=0.3)


@pytest.mark.parametrize("absent", [(), (1, 3)], ids=str)
def test_ranks_that_make_an_nccl_group_wait_for_each_other(
    absent: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL itself makes nobody wait until its first operation, and there without a time-out."""
    store, cuda = dist.HashStore(), torch.device("cuda")  # type: ignore[attr-defined]

    class Parent:
        """As much of a group with NCCL as is looked at."""

        _device_types = (cuda,)

        def __init__(self, rank: int) -> None:
            self.rank, self.size, self.get_group_store = lambda: rank, lambda: 4, lambda: store

        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(name=lambda: "NCCL")

    def made(kind: str, store: Any, rank: int, size: int, limit: timedelta) -> Any:
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)  # type: ignore[attr-defined]  # stands for NCCL's

    monkeypatch.setattr("dynamiq_transport.group._backend", made)

    def work(rank: int) -> Any:
        if not absent:
            time.sleep(0.1 * rank)
        return dedicated_group(Parent(rank), timeout=2.0 if absent else 60.0)  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        futures = {rank: pool.submit(work, rank) for rank in range(4) if rank not in absent}
    for rank, future in futures.items():
        if absent:
            with pytest.raises(
                TransportError, match=f"rank {rank} of 4 .* rank 1, 3 did not come within 2 s"
            ) as caught:
                future.result()
            assert caught.value.peers == absent
        else:
            assert future.result()._device_types == [cuda]


def test_cuda_tensors_over_gloo_are_refused(gloo_threads: Threads) -> None:
    """Gloo's messages are written from memory of the host: from a GPU's they would fail as if the peer were lost."""

    def work(group: dist.ProcessGroup) -> None:
        group._register_backend(
            torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, group._get_backend(torch.device("cpu"))
        )
        with TorchTransport(group, timeout=5.0) as transport:
            with FakeTensorMode(allow_non_fake_inputs=True):
                sent = torch.empty(8, dtype=torch.uint8, device="cuda:0")
                with pytest.raises(ValueError, match=r'cuda:0 cannot go by gloo.*"cpu:gloo,cuda:nccl"'):
                    transport.exchange([(1 - transport.rank, sent)], [])
            all_to_all(transport, "cpu")  # nothing was begun

    gloo_threads(2, work)


def test_address_in_place_of_an_interface(gloo_threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: dist.ProcessGroup) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "127.0.0.1")
        with pytest.raises(TransportError, match="name of an interface"):
            TorchTransport.dedicated(group, timeout=5.0)

    gloo_threads(1, work)


def test_what_is_no_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        TorchTransport()
    with pytest.raises(ValueError, match="init_process_group"):
        TorchTransport.dedicated()
    for other in (dist.GroupMember.NON_GROUP_MEMBER, "gloo"):
        with pytest.raises(TypeError, match="member"):
            TorchTransport(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_timeout_out_of_range(gloo_threads: Threads, timeout: float) -> None:
    def work(group: dist.ProcessGroup) -> None:
        for make in (TorchTransport, TorchTransport.dedicated):
            with pytest.raises(ValueError, match="seconds above 0"):
                make(group, timeout=timeout)

    gloo_threads(1, work)
