"""Training over MPI in which one rank stops in the middle of a backward pass; see test_mpi.py. Argument: seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, DynamiQState, dynamiq_hook
from dynamiq_transport.mpi import MPITransport, init_process_group_from_mpi

timeout = float(sys.argv[1])
torch.set_num_threads(1)
rank, victim = MPI.COMM_WORLD.rank, 1
init_process_group_from_mpi(timeout=60.0)
ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.02)
state = DynamiQState(
    codec=BF16(),
    schedule="direct",
    min_compress_numel=0,
    timeout=timeout,
    transport=lambda: MPITransport(timeout=timeout),
)
ddp.register_comm_hook(state, dynamiq_hook)
for _ in range(2):
    ddp(torch.full((1, 64), rank + 1.0)).sum().backward()
if rank == victim:
    ddp.module[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
started = time.monotonic()
try:
    ddp(torch.full((1, 64), rank + 1.0)).sum().backward()
except CommunicationError as error:
    seconds = time.monotonic() - started
    result = {"rank": rank, "peers": error.peers, "step": error.step, "seconds": seconds, "message": str(error)}
    if rank != victim:  # which Open MPI wakes up again in order to end it
        os.write(1, (json.dumps(result) + "\n").encode())
    time.sleep(timeout)  # so that the others see the rank that stopped, and not one that has left
MPI.COMM_WORLD.Abort(3)
