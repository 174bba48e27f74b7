"""Learn to predict the next byte of this repository's licence, on the ranks of torchrun."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_ddp import DynamiQState, dynamiq_hook

CONTEXT, BATCH, STEPS = 8, 64, 200

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bits", type=float, help="budget; float32 without it")
parser.add_argument("--measure-every", type=int, default=0, help="in steps")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

text = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
windows = text.unfold(0, CONTEXT + 1, 1)  # 8 bytes to look at, and one to predict

torch.manual_seed(0)  # the same model on every rank
layers = nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 128)
model = nn.Sequential(nn.Embedding(128, 32), nn.Flatten(), *layers)
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

state = None
if options.bits is not None:
    state = DynamiQState(bits=options.bits, measure_every=options.measure_every)
    model.register_comm_hook(state, dynamiq_hook)

batches = torch.Generator().manual_seed(1 + rank)  # other data on every rank
for step in range(1, STEPS + 1):
    batch = windows[torch.randint(len(windows), (BATCH,), generator=batches)]
    loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        dist.all_reduce(loss.detach().div_(ranks))
        if rank == 0:
            print(f"step {step:3}  loss {loss:.2f}")

# The report.
parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
first = parameters.clone()
dist.broadcast(first, src=0)
identical = torch.tensor(int(torch.equal(parameters, first)))
dist.all_reduce(identical, op=dist.ReduceOp.MIN)
if rank == 0:
    print(f"replicas identical: {'yes' if identical else 'NO'}")
    if state is not None:
        stats = state.stats()
        print(f"bits per coordinate: {stats.bits_per_coordinate:.2f}")
        print(f"sent by rank 0: {stats.bytes_sent / 1e6:.2f} MB")
        measured = "" if stats.measured_vnmse is None else f", {stats.measured_vnmse:.1e} measured"
        print(f"vNMSE: {stats.predicted_vnmse:.1e} predicted{measured}")
        print(f"backend: {stats.backend}")
dist.destroy_process_group()
