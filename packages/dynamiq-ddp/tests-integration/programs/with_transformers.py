"""Run by torchrun: the Trainer of Hugging Face Transformers, with the plain all-reduce and with DynamiQ."""

import sys
from pathlib import Path
from typing import Any

from task import BATCH, make_data, make_model, report
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from dynamiq_ddp import DynamiQState, dynamiq_hook


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.model(x) - labels).square().mean()}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.data = make_data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, y = self.data[i]
        return {"x": x, "labels": y}


class Compress(TrainerCallback):
    def __init__(self, trainer: Trainer, state: DynamiQState) -> None:
        self.trainer, self.state = trainer, state

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        # The callback's own argument `model` is the model without DistributedDataParallel around it.
        self.trainer.model_wrapped.register_comm_hook(self.state, dynamiq_hook)


def train(folder: Path, state: DynamiQState | None) -> Regression:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=Rows())
    if state is not None:
        trainer.add_callback(Compress(trainer, state))
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    plain = train(Path(sys.argv[1]), None)
    state = DynamiQState(bits=5.0)
    compressed = train(Path(sys.argv[1]), state)
    report(plain.model, compressed.model, state)
    state.close()
