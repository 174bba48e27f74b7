"""Run by torchrun: DDP alone, with torch's own wrapper around the hook, which hands gradients on in float16."""

import torch
import torch.distributed as dist
from task import BATCH, make_data, make_model, report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dynamiq_ddp import DynamiQState, dynamiq_hook


def train(state: DynamiQState | None) -> nn.Module:
    data = make_data()
    model = DistributedDataParallel(make_model())
    if state is not None:
        model.register_comm_hook(state, fp16_compress_wrapper(dynamiq_hook))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for x, y in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model.module


if __name__ == "__main__":
    dist.init_process_group("gloo")
    plain = train(None)
    state = DynamiQState(bits=5.0)
    report(plain, train(state), state)
    state.close()
    dist.destroy_process_group()
