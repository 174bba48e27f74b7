"""Run by torchrun: Hugging Face Accelerate, with the plain all-reduce and with DynamiQ."""

import torch
from accelerate import Accelerator
from task import BATCH, make_data, make_model, report
from torch import nn
from torch.utils.data import DataLoader

from dynamiq_ddp import DynamiQState, dynamiq_hook


def train(state: DynamiQState | None) -> nn.Module:
    # begin
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(make_data(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if state is not None:
        model.register_comm_hook(state, dynamiq_hook)  # prepare has wrapped it in DistributedDataParallel
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
    # end
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    plain = train(None)
    state = DynamiQState(bits=5.0)
    report(plain, train(state), state)
    state.close()
    Accelerator().end_training()
