"""Ranks that a launcher has started: torchrun, mpiexec, or whatever sets RANK, WORLD_SIZE and MASTER_ADDR.

A network is seen here through three things: a transport, more of the kind for further lanes, and the library's own
all-reduce, which is what compression competes with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq_core import ConfigError
from dynamiq_transport import TorchTransport, Transport

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
TRANSPORTS = ("gloo", "nccl", "mpi")

LAUNCH = "torchrun --nproc-per-node 4 --no-python dynamiq-ddp bench, or mpiexec -n 4 dynamiq-ddp bench"


class Network(NamedTuple):
    """What a rank sees of the others.

    Attributes:
        name: of the transport: gloo, nccl or mpi.
        transport: to the other ranks.
        device: where messages live.
        another: makes a further transport; all ranks call it together.
        stock: replaces a tensor by its sum over the ranks as the library does it, and waits for that.
    """

    name: str
    transport: Transport
    device: torch.device
    another: Callable[[], Transport]
    stock: Callable[[Tensor], None]


def started_by_mpi() -> bool:
    """Whether an MPI launcher has started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)


@contextmanager
def network(name: str | None, *, timeout: float) -> Iterator[Network]:
    """Join the other ranks.

    Args:
        name: out of `TRANSPORTS`; by launcher and device when None.
        timeout: seconds to wait for another rank.

    Raises:
        ConfigError: no launcher has started this process, or there is no such transport.
    """
    if name is not None and name not in TRANSPORTS:
        raise ConfigError(f"transport cannot be {name!r}; allowed: {', '.join(TRANSPORTS)}")
    if not started_by_mpi() and "RANK" not in os.environ:
        raise ConfigError(f"this runs on several ranks; start it with {LAUNCH}")
    if name == "mpi" or (name is None and "RANK" not in os.environ):
        with _mpi(timeout) as made:
            yield made
    else:
        with _torch(name, timeout) as made:
            yield made


@contextmanager
def _mpi(timeout: float) -> Iterator[Network]:
    from mpi4py import MPI

    from dynamiq_transport.mpi import MPITransport

    def stock(tensor: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())

    def another() -> Transport:
        return MPITransport(MPI.COMM_WORLD, timeout=timeout)

    with another() as transport:
        yield Network("mpi", transport, torch.device("cpu"), another, stock)


@contextmanager
def _torch(name: str | None, timeout: float) -> Iterator[Network]:
    backend = name or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ConfigError("transport nccl needs a GPU, and there is none")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if started_by_mpi() and "RANK" not in os.environ:
        from dynamiq_transport.mpi import init_process_group_from_mpi

        if backend != "gloo":
            raise ConfigError(f"transport {backend} under mpiexec needs RANK, WORLD_SIZE and MASTER_ADDR to be set")
        init_process_group_from_mpi(timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        world = dist.group.WORLD
        if world is None:
            raise ConfigError("there is no process group of all ranks")

        def another() -> Transport:
            return TorchTransport.dedicated(world, timeout=timeout)

        def stock(tensor: Tensor) -> None:
            dist.all_reduce(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

        with another() as transport:
            yield Network(backend, transport, device, another, stock)
    finally:
        dist.destroy_process_group()
