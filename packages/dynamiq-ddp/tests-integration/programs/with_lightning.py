"""Run by torchrun: Lightning, with the plain all-reduce and with DynamiQ."""

import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from task import BATCH, make_data, make_model, report
from torch import Tensor
from torch.utils.data import DataLoader

from dynamiq_ddp import DynamiQState, dynamiq_hook

warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Compress(lightning.Callback):
    def __init__(self, state: DynamiQState) -> None:
        self.state = state

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(self.state, dynamiq_hook)  # DDP, as the strategy has wrapped it


def train(strategy: DDPStrategy, *callbacks: lightning.Callback) -> Regression:
    module = Regression()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=list(callbacks), max_epochs=1, **quiet
    )
    trainer.fit(module, DataLoader(make_data(), batch_size=BATCH))
    return module


if __name__ == "__main__":
    plain = train(DDPStrategy())
    # Lightning leaves the strategy's own hook out where the device is no CUDA device.
    left_out = DynamiQState(bits=5.0)
    train(DDPStrategy(ddp_comm_state=left_out, ddp_comm_hook=dynamiq_hook))
    state = DynamiQState(bits=5.0)
    compressed = train(DDPStrategy(), Compress(state))
    report(plain.model, compressed.model, state, left_out=left_out.stats().bytes_sent)
    state.close()
