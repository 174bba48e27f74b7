"""Final validation loss of the demo's model at several budgets, with error feedback and without, against exact means.

    python packages/dynamiq-ddp/benchmarks/convergence.py [--seeds 0 1 2] [--bits 5 4 3 2 2+] [--steps 200]

A budget with a plus is with error feedback; 32 is the exact mean. All ranks live in one process: their gradients are
computed one after the other, and averaged by the real states over an in-process transport. With ``--out`` every row is
kept as soon as it is known, and a row that is there already is not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dynamiq_ddp import DynamiQState
from dynamiq_ddp.demo.data import Corpus, batch, load_corpus
from dynamiq_ddp.demo.model import GPT, GPTConfig
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.demo.train import VALIDATION_BATCH_SIZE, VALIDATION_BATCHES
from dynamiq_transport import LocalTransport

EXACT = "32"


class Row(NamedTuple):
    """One run."""

    bits: str
    seed: int
    steps: int
    ranks: int
    schedule: str
    parameters: int
    validation_loss: float
    bits_per_coordinate: float
    seconds: float


class Averager:
    """The ranks' states, or the exact mean."""

    def __init__(self, bits: str, ranks: int, schedule: str) -> None:
        self.states: list[DynamiQState] = []
        if bits != EXACT:
            for transport in LocalTransport.group(ranks, timeout=120):
                self.states.append(
                    DynamiQState(
                        bits=float(bits.rstrip("+")),
                        error_feedback=bits.endswith("+"),
                        schedule=schedule,
                        transport=lambda transport=transport: transport,
                        lanes=1,
                    )
                )

    def __call__(self, gradients: Tensor) -> Tensor:
        """The mean of float32 [n, d]."""
        if not self.states:
            return gradients.mean(dim=0)
        # The ranks meet when the first bucket is begun, so each of them needs a thread.
        with ThreadPoolExecutor(len(self.states)) as pool:
            means = list(pool.map(lambda state, row: state.begin(row.clone(), index=0).wait(), self.states, gradients))
        if not all(torch.equal(mean, means[0]) for mean in means):
            raise RuntimeError("the ranks ended with different means")
        return means[0]

    def bits_per_coordinate(self) -> float:
        """As the states count them."""
        return self.states[0].stats().bits_per_coordinate if self.states else 32.0

    def close(self) -> None:
        """End the states' threads."""
        for state in self.states:
            state.close()


def run(bits: str, recipe: Recipe, corpus: Corpus, *, ranks: int, schedule: str) -> Row:
    """Train from scratch and validate."""
    began = time.perf_counter()
    model = GPT(recipe.model, seed=recipe.seed)
    parameters = list(model.parameters())[::-1]  # about the order in which DDP fills its buckets
    optimizer = recipe.optimizer(model)
    rates = LambdaLR(optimizer, recipe.rate)
    average = Averager(bits, ranks, schedule)
    sizes = [p.numel() for p in parameters]
    gradients = torch.empty(ranks, sum(sizes))
    for step in range(recipe.steps):
        for worker, row in enumerate(gradients):
            loss = model(*recipe.batch(corpus, step=step, worker=worker))
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)], out=row)
        for parameter, part in zip(parameters, torch.split(average(gradients), sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(parameters, recipe.clip)
        optimizer.step()
        rates.step()
    average.close()
    return Row(
        bits=bits,
        seed=recipe.seed,
        steps=recipe.steps,
        ranks=ranks,
        schedule=schedule,
        parameters=sum(sizes),
        validation_loss=validate(model, recipe, corpus),
        bits_per_coordinate=average.bits_per_coordinate(),
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def validate(model: nn.Module, recipe: Recipe, corpus: Corpus) -> float:
    """Loss on held-out files in nats per byte, over the batches of the demo."""
    losses = [
        model(
            *batch(
                corpus.validation,
                size=VALIDATION_BATCH_SIZE,
                context=recipe.model.context,
                step=index,
                worker=0,
                seed=0,
            )
        )
        for index in range(VALIDATION_BATCHES)
    ]
    return float(torch.stack(losses).to(torch.float64).mean())


def table(rows: Sequence[Row]) -> str:
    """Mean and spread over the seeds, and the difference to the exact mean of the same seeds."""
    exact = {row.seed: row.validation_loss for row in rows if row.bits == EXACT}
    lines = [
        "| budget | bits sent | validation loss | smallest to largest | above the exact mean |",
        "| --- " * 5 + "|",
    ]
    for bits in dict.fromkeys(row.bits for row in rows):
        mine = [row for row in rows if row.bits == bits]
        losses = [row.validation_loss for row in mine]
        gaps = [row.validation_loss / exact[row.seed] - 1 for row in mine if row.seed in exact]
        gap = f"{sum(gaps) / len(gaps):+.2%}" if gaps else ""
        lines.append(
            f"| {bits} | {mine[0].bits_per_coordinate:.3f} | {sum(losses) / len(losses):.4f} "
            f"| {min(losses):.4f} to {max(losses):.4f} | {gap} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bits", nargs="+", default=[EXACT, "5", "4", "3", "3+", "2", "2+"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedule", default="ring")
    parser.add_argument("--width", type=int, default=GPTConfig().width, help="of the model")
    parser.add_argument("--layers", type=int, default=GPTConfig().layers, help="of the model")
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    options = parser.parse_args()
    torch.set_num_threads(2)
    corpus = load_corpus()
    rows = [Row(**row) for row in json.loads(options.out.read_text())] if options.out and options.out.exists() else []
    model = GPTConfig(width=options.width, layers=options.layers)
    for seed in options.seeds:
        for bits in options.bits:
            recipe = Recipe(steps=options.steps, seed=seed, model=model)
            if any((row.bits, row.seed) == (bits, seed) for row in rows):
                continue
            rows.append(run(bits, recipe, corpus, ranks=options.ranks, schedule=options.schedule))
            print(json.dumps(rows[-1]._asdict()), flush=True)
            if options.out:
                options.out.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
