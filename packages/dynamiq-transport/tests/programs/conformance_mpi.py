"""The conformance suite over MPI: pytest runs in every process that mpiexec has started; see test_mpi.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from dynamiq_transport import Transport
from dynamiq_transport.conformance import Conformance
from dynamiq_transport.mpi import MPITransport

torch.set_num_threads(1)


def run_mpi(size: int, function: Callable[[Transport], Any], *, timeout: float) -> None:
    """Call the function on the last ``size`` ranks, so that ranks of the group and of the world differ."""
    world = MPI.COMM_WORLD
    members = range(world.size - size, world.size)
    if world.rank in members:
        comm = world.Create_group(world.group.Incl(list(members)))
        with MPITransport(comm, timeout=timeout) as transport:
            function(transport)


class TestMPITransport(Conformance):
    launch = staticmethod(run_mpi)
    sizes = tuple(range(1, 5)) if MPI.COMM_WORLD.size == 4 else (MPI.COMM_WORLD.size,)


class TestInParts(Conformance):
    """With a limit of 1 kB most messages travel in several parts."""

    sizes = (MPI.COMM_WORLD.size,)

    @staticmethod
    def launch(size: int, function: Callable[[Transport], Any], *, timeout: float) -> None:
        with MPITransport(timeout=timeout, part_bytes=1000) as transport:
            function(transport)
