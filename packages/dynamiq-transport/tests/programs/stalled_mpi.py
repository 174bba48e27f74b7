"""One rank stops or dies under mpiexec; see test_mpi.py. Arguments: fault, timeout in seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from mpi4py import MPI

from dynamiq_transport import TransportError
from dynamiq_transport.conformance import all_to_all
from dynamiq_transport.mpi import MPITransport

fault, timeout = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
world = MPI.COMM_WORLD
victim = world.size // 2
survivors = world.Create_group(world.group.Excl([victim])) if world.rank != victim else MPI.COMM_NULL
transport = MPITransport(timeout=60.0)
all_to_all(transport, "cpu")
transport.timeout = timeout
world.Barrier()
if world.rank == victim:
    os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
started = time.monotonic()
try:
    all_to_all(transport, "cpu")
except TransportError as error:
    result = {"rank": world.rank, "peers": error.peers, "seconds": time.monotonic() - started, "message": str(error)}
    with MPITransport(survivors, timeout=60.0) as second:  # type: ignore[arg-type]
        all_to_all(second, "cpu")
        os.write(1, (json.dumps(result) + "\n").encode())
        survivors.Barrier()
world.Abort(3)
