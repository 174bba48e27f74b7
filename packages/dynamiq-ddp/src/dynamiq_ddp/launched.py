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

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

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


def rank_here() -> int:
    """This process's rank, if torchrun or an MPI launcher has started it, and 0 otherwise.

    ``RANK`` by itself says nothing: a job's environment may hold it for every shell.
    """
    names = ("RANK", *RANK_VARIABLES) if dist.is_torchelastic_launched() else RANK_VARIABLES
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def launcher() -> str | None:
    """What has started this process: ``"torchrun"``, ``"mpiexec"``, ``"RANK"`` for another that sets that; or None."""
    if dist.is_torchelastic_launched():
        return "torchrun"
    if "RANK" in os.environ:
        return "RANK"
    return "mpiexec" if started_by_mpi() else None


def default_transport() -> str:
    """The transport that fits the launcher and the devices."""
    if launcher() == "mpiexec":
        return "mpi"
    return "nccl" if torch.cuda.is_available() else "gloo"


@contextmanager
def network(name: str | None, *, timeout: float) -> Iterator[Network]:
    """Join the other ranks.

    Args:
        name: out of `TRANSPORTS`; by launcher and device when None.
        timeout: seconds to wait for another rank.

    Raises:
        ConfigError: no launcher has started this process, the transport is not there or cannot run here, or the ranks
            did not find each other.
    """
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"timeout cannot be {timeout}; allowed: seconds above 0")
    if name is not None and name not in TRANSPORTS:
        raise ConfigError(f"transport cannot be {name!r}; allowed: {', '.join(TRANSPORTS)}")
    if launcher() is None:
        raise ConfigError(f"this runs on several ranks; start it with {LAUNCH}")
    name = name or default_transport()
    with _mpi(timeout) if name == "mpi" else _torch(name, timeout) as made:
        yield made


def join(backend: str, *, timeout: float) -> None:
    """Make the default process group of the ranks that a launcher has started.

    Raises:
        ConfigError: the environment does not say who they are, or they do not find each other.
    """
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the ranks cannot join: {error}") from error


@contextmanager
def _mpi(timeout: float) -> Iterator[Network]:
    try:
        from mpi4py import MPI

        from dynamiq_transport.mpi import MPITransport
    except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no MPI library
        raise ConfigError(f'transport mpi cannot run: {error}; pip install "dynamiq-ddp[mpi]"') from error

    def stock(tensor: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())

    def another() -> Transport:
        return MPITransport(MPI.COMM_WORLD, timeout=timeout)

    with another() as transport:
        yield Network("mpi", transport, torch.device("cpu"), another, stock)


@contextmanager
def _torch(backend: str, timeout: float) -> Iterator[Network]:
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ConfigError("transport nccl needs a GPU, and there is none")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if launcher() == "mpiexec":
        from dynamiq_transport.mpi import init_process_group_from_mpi

        if backend != "gloo":
            raise ConfigError(f"transport {backend} under mpiexec needs RANK, WORLD_SIZE and MASTER_ADDR to be set")
        init_process_group_from_mpi(timeout=timeout)
    else:
        join(backend, timeout=timeout)
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
