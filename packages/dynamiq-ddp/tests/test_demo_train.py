"""A training run of the demo on real ranks; this file is also the program that they run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dynamiq_ddp.demo.capture import capture_gradients
from dynamiq_ddp.demo.data import batch, load_corpus
from dynamiq_ddp.demo.model import GPT, GPTConfig
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.demo.train import train, validate

RANKS = 2
RECIPE = Recipe(steps=3, seed=1, batch_size=2, warmup=2, model=GPTConfig(width=32, layers=1, heads=2, context=16))
NOISE = 1e-3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank measured: plain, plain again, with a hook of known error, with a hook that differs by rank."""
    folder = tmp_path_factory.mktemp("runs")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__, str(folder)]
    subprocess.run([sys.executable, *launch], check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_equal_recipes_give_equal_runs(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        for key in ("losses", "validation_loss"):
            assert rank["plain"][key] == rank["again"][key]


def test_ranks_agree_on_the_figures(runs: list[dict[str, Any]]) -> None:
    first, second = runs
    for key in ("losses", "validation_loss", "vnmse", "replicas_identical"):
        assert first["plain"][key] == second["plain"][key]


def test_every_step_is_measured_and_watched(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert len(rank["plain"]["losses"]) == len(rank["plain"]["step_seconds"]) == RECIPE.steps
        assert [step for step, _, _ in rank["watched"]] == list(range(RECIPE.steps))
        assert [seconds for _, _, seconds in rank["watched"]] == rank["plain"]["step_seconds"]
    means = [(a[1] + b[1]) / 2 for a, b in zip(runs[0]["watched"], runs[1]["watched"], strict=True)]
    assert means == pytest.approx(runs[0]["plain"]["losses"])
    assert runs[0]["watched"][0][1] != runs[1]["watched"][0][1], "both ranks saw the same batch"


def test_plain_allreduce_is_exact_but_for_float32(runs: list[dict[str, Any]]) -> None:
    assert 0 <= runs[0]["plain"]["vnmse"] < 1e-12


def test_error_of_a_hook_is_measured(runs: list[dict[str, Any]]) -> None:
    # Every coordinate is off by the factor 1 +- sqrt(NOISE).
    assert runs[0]["noisy"]["vnmse"] == pytest.approx(NOISE, rel=1e-4)
    assert runs[0]["noisy"]["losses"][0] == runs[0]["plain"]["losses"][0]
    assert runs[0]["noisy"]["losses"][2] != runs[0]["plain"]["losses"][2]


def test_diverged_replicas_are_noticed(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank["plain"]["replicas_identical"]
        assert rank["noisy"]["replicas_identical"]
        assert not rank["diverging"]["replicas_identical"]


def test_validation_covers_the_same_batches_on_any_number_of_ranks(runs: list[dict[str, Any]]) -> None:
    model, text = GPT(RECIPE.model, seed=9), load_corpus().validation
    batches = [batch(text, size=32, context=16, step=index, worker=0, seed=0) for index in range(16)]
    expected = sum(model(*each).item() for each in batches) / 16
    assert runs[0]["validation_of_seed_9"] == runs[1]["validation_of_seed_9"] == pytest.approx(expected, rel=1e-6)


def test_captured_gradients_are_those_of_the_ranks(runs: list[dict[str, Any]]) -> None:
    for index, row in enumerate(capture_gradients(RANKS, RECIPE.steps - 1, recipe=RECIPE)):
        assert runs[index]["gradient_norm"] == pytest.approx(row.norm().item(), rel=1e-4)


def noisy_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce, then an error of known size that is the same on all ranks."""
    signs = torch.ones(bucket.buffer().numel()).bernoulli_(generator=torch.Generator().manual_seed(0)) * 2 - 1
    return completed(allreduce_hook(None, bucket).wait() * (1 + NOISE**0.5 * signs))


def diverging_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce, then a small error in one coordinate, on rank 1 only."""
    result: Tensor = allreduce_hook(None, bucket).wait()
    if dist.get_rank() == 1:
        result[-1] += 1e-3
    return completed(result)


def completed(result: Tensor) -> torch.futures.Future[Tensor]:
    """The hooks here wait: a Python callback would run, and end, in a thread of Gloo's, beside a process that ends."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def measure(folder: Path) -> None:
    """One rank's part: all runs, written to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    corpus = load_corpus()
    watched: list[tuple[int, float, float]] = []
    norms: list[float] = []

    def observing_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        norms.append(bucket.buffer().norm().item())
        return allreduce_hook(None, bucket)

    def with_hook(hook: Any) -> Any:
        def install(model: DistributedDataParallel) -> None:
            model.register_comm_hook(None, hook)

        return install

    runs = {
        "plain": train(
            lambda model: None, recipe=RECIPE, corpus=corpus, watch=lambda *seen: watched.append(seen)
        )._asdict(),
        "again": train(with_hook(observing_hook), recipe=RECIPE, corpus=corpus)._asdict(),
        "noisy": train(with_hook(noisy_hook), recipe=RECIPE, corpus=corpus)._asdict(),
        "diverging": train(with_hook(diverging_hook), recipe=RECIPE, corpus=corpus)._asdict(),
    }
    validation = validate(GPT(RECIPE.model, seed=9), recipe=RECIPE, corpus=corpus)
    result = {**runs, "watched": watched, "gradient_norm": norms[-1], "validation_of_seed_9": validation}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
    # Without an end of the interpreter, during which a thread of Gloo's that wants it aborts the process now and then.
    os._exit(0)
