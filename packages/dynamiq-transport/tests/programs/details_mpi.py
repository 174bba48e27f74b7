"""What is particular to MPI; pytest runs in every process that mpiexec has started; see test_mpi.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from dynamiq_transport import TransportError
from dynamiq_transport.conformance import all_to_all, many_in_flight, pass_round
from dynamiq_transport.mpi import MPITransport, init_process_group_from_mpi

torch.set_num_threads(1)
LEVEL = MPI.Query_thread()


def test_ddp_runs_on_a_group_made_from_the_communicator() -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    init_process_group_from_mpi(timeout=60.0)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        with MPITransport(timeout=60.0) as transport:  # gradients by Gloo, other bytes by MPI
            model(torch.full((1, 1), float(rank))).backward()
            all_to_all(transport, "cpu")
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.item() == pytest.approx((size - 1) / 2)
    finally:
        dist.destroy_process_group()


def test_group_can_be_made_again() -> None:
    for _ in range(2):
        init_process_group_from_mpi(timeout=60.0)
        dist.destroy_process_group()


def test_unreachable_host_is_an_error_on_every_rank() -> None:
    with pytest.raises(TransportError, match=r"no\.such\.host\.invalid"):
        init_process_group_from_mpi(host="no.such.host.invalid", timeout=1.0)
    assert not dist.is_initialized()


@pytest.mark.skipif(LEVEL < MPI.THREAD_SERIALIZED, reason="MPI allows the main thread only")
def test_two_lanes_on_two_threads() -> None:
    """With the level SERIALIZED the lanes take turns in calling MPI, and none of them keeps its turn while it waits."""
    with MPITransport(timeout=60.0) as first, MPITransport(timeout=60.0) as second, ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(partial(function, lane, "cpu"))
            for lane, function in ((first, pass_round), (second, many_in_flight))
        ]
        for future in work:
            future.result()


@pytest.mark.skipif(LEVEL >= MPI.THREAD_SERIALIZED, reason="MPI allows other threads")
def test_another_thread_is_refused_where_mpi_allows_only_the_main_one() -> None:
    with MPITransport(timeout=60.0) as transport, ThreadPoolExecutor(1) as pool:
        all_to_all(transport, "cpu")
        with pytest.raises(TransportError, match="MPI4PY_RC_THREAD_LEVEL"):
            pool.submit(all_to_all, transport, "cpu").result()
        all_to_all(transport, "cpu")


def test_users_own_messages_are_left_alone() -> None:
    """The same peer, size and tag on the communicator that the transport was made from."""
    comm = MPI.COMM_WORLD
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    with MPITransport(comm, timeout=60.0) as transport:
        wanted = comm.Irecv([mine, MPI.BYTE], before, 100)
        handle = transport.exchange([(after, torch.full_like(mine, 2))], [(before, theirs)])
        comm.Send([torch.full_like(mine, 1), MPI.BYTE], after, 100)
        handle.wait()
        wanted.Wait()
    assert bool((mine == 1).all())
    assert bool((theirs == 2).all())


def test_device_memory_is_refused_unless_the_library_takes_it() -> None:
    with MPITransport(timeout=60.0) as transport:
        elsewhere = torch.empty(8, dtype=torch.uint8, device="meta")
        with pytest.raises(ValueError, match=r"no memory of meta.*NCCL"):
            transport.exchange([((transport.rank + 1) % transport.size, elsewhere)], [])
        all_to_all(transport, "cpu")


def test_bad_arguments() -> None:
    for part_bytes in (0, -1, 1 << 31):
        with pytest.raises(ValueError, match=f"part_bytes cannot be {part_bytes}"):
            MPITransport(part_bytes=part_bytes)
    with pytest.raises(ValueError, match="intra-communicator"):
        MPITransport(MPI.COMM_NULL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout cannot be 0"):
        MPITransport(timeout=0)
    with pytest.raises(ValueError, match="intra-communicator"):
        init_process_group_from_mpi(MPI.COMM_NULL)  # type: ignore[arg-type]
