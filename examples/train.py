"""A training script with DistributedDataParallel: two lines make it send 5 bits per coordinate.

    torchrun --nproc-per-node 2 examples/train.py

Needs dynamiq-ddp. On one machine set GLOO_SOCKET_IFNAME=lo if the machine's name does not resolve.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_ddp import DynamiQState, dynamiq_hook

WIDTH = 128

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # the same model and the same task everywhere
target = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)),
)
state = DynamiQState(bits=5.0, schedule="ring")
model.register_comm_hook(state, dynamiq_hook)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

data = torch.Generator().manual_seed(1 + rank)  # and other data on every rank
for step in range(41):
    x = torch.randn(32, WIDTH, generator=data)
    loss = (model(x) - x @ target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

stats = state.stats()
if rank == 0:
    print(f"{stats.bits_per_coordinate:.2f} bits per coordinate, {stats.bytes_sent / stats.steps:.0f} bytes per step")
state.close()
dist.destroy_process_group()
