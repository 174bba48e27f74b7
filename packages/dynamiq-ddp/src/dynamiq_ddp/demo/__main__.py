"""Train a byte-level GPT on Python's own library twice, with the plain all-reduce and with DynamiQ, and compare.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m dynamiq_ddp.demo

The last line that rank 0 prints is one JSON object with the figures of the table.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from dynamiq_core.errors import DynamiQError
from dynamiq_ddp import DynamiQState, dynamiq_hook

from .data import load_corpus
from .model import GPT
from .recipe import Recipe
from .report import Report, Traffic
from .train import Install, Run, train

LAUNCH = "python -m torch.distributed.run --standalone --nproc-per-node 4 -m dynamiq_ddp.demo"


def main() -> None:
    """Command line of the demo."""
    options = _parse()
    try:
        # Built before the first run, so that a bad option is reported at once and not after minutes.
        recipe = Recipe(steps=options.steps, seed=options.seed)
        state = DynamiQState(bits=options.bits, schedule=options.schedule, backend=options.backend)
        if "RANK" not in os.environ:
            raise DynamiQError(f"the demo runs on several processes; start it as\n  {LAUNCH}")
        _initialize()
        try:
            report = compare(state, recipe)
        finally:
            dist.destroy_process_group()
    except DynamiQError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if report is not None:
        picture = options.out / "loss.png"
        report.plot(picture)
        Console().print(report.table())
        print(f"loss curves: {picture}\n{report.json()}", flush=True)


def compare(state: DynamiQState, recipe: Recipe) -> Report | None:
    """Train with the plain all-reduce, then with ``state``; the report on rank 0 and None elsewhere."""
    start = time.perf_counter()
    corpus = load_corpus()
    parameters = sum(p.numel() for p in GPT(recipe.model).parameters())

    def install(model: DistributedDataParallel) -> None:
        model.register_comm_hook(state, dynamiq_hook)

    def run(name: str, install: Install) -> Run:
        with tqdm(total=recipe.steps, desc=f"{name:>10}", disable=dist.get_rank() != 0, unit="step") as bar:

            def watch(step: int, loss: float, seconds: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}, {1e3 * seconds:.0f} ms", refresh=False)
                bar.update()

            return train(install, recipe=recipe, corpus=corpus, watch=watch)

    plain = run("all-reduce", lambda model: None)
    ours = run("DynamiQ", install)
    stats = state.stats()
    sent = torch.tensor(stats.bytes_sent, dtype=torch.float64)
    dist.all_reduce(sent)
    if dist.get_rank() != 0:
        return None
    ranks = dist.get_world_size()
    return Report(
        allreduce=plain,
        dynamiq=ours,
        traffic=Traffic(
            bits_per_coordinate=stats.bits_per_coordinate,
            bytes_per_step=sent.item() / ranks / recipe.steps,
            codec_share=stats.seconds_codec / sum(ours.step_seconds),
            backend=stats.backend,
        ),
        ranks=ranks,
        parameters=parameters,
        seconds=time.perf_counter() - start,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dynamiq_ddp.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=float, default=5.0, help="budget per coordinate (default: %(default)s)")
    parser.add_argument("--schedule", default="ring", help="ring or butterfly (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="what runs the codec (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="directory of the picture (default: %(default)s)"
    )
    return parser.parse_args()


def _initialize() -> None:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local))
    if local == int(os.environ["WORLD_SIZE"]):
        # Gloo listens where the host's name points, which on laptops and in containers is often nowhere.
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))


if __name__ == "__main__":
    main()
