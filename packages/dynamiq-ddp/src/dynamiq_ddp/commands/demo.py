"""Train a byte-level GPT on Python's own library twice, with the plain all-reduce and with DynamiQ, and compare.

Ranks are processes that torchrun starts, here four on one machine; `python -m dynamiq_ddp.demo` is the same command:

    torchrun --standalone --nproc-per-node 4 --no-python dynamiq-ddp demo
    torchrun --standalone --nproc-per-node 2 --no-python dynamiq-ddp demo --bits 4 --schedule butterfly --steps 50

It prints a table of both runs (validation loss, bits on the wire, what was sent, vNMSE, whether the replicas are
bit-identical, times), and as its last line the figures of the table as one JSON object. With --json that line is all.
It draws both loss curves, and names the picture on standard error.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from dynamiq_core import ConfigError
from dynamiq_ddp.demo.data import load_corpus
from dynamiq_ddp.demo.model import GPT
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.demo.report import Report, Traffic
from dynamiq_ddp.demo.train import Install, Run, train
from dynamiq_ddp.hook import dynamiq_hook
from dynamiq_ddp.launched import join
from dynamiq_ddp.route import SCHEDULES
from dynamiq_ddp.state import DynamiQState
from dynamiq_kernels import Backend, operations

from . import output
from .completion import FILES, complete

LAUNCH = "torchrun --standalone --nproc-per-node 4 --no-python dynamiq-ddp demo"
FOLDER = Path("demo-output")
TIMEOUT = 300.0
"""Seconds for which a rank waits for another one."""


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="train a small model plainly and compressed, on ranks that torchrun starts", description=__doc__
    )
    parser.add_argument("--bits", type=float, default=5.0, help="budget per coordinate (default: %(default)s)")
    known = ", ".join(SCHEDULES)
    schedule = parser.add_argument(
        "--schedule", default="ring", help=f"{known}, auto or hierarchical:NODE_SIZE (default: %(default)s)"
    )
    complete(schedule, (*SCHEDULES, "auto"))
    backends = get_args(Backend)
    backend = parser.add_argument("--backend", default="auto", help=f"{', '.join(backends)} (default: %(default)s)")
    complete(backend, backends)
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    out = parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"where the picture goes (default: {FOLDER}, if matplotlib is there to draw it)",
    )
    complete(out, FILES)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.set_defaults(run=run, on_every_rank=True)
    return parser


def run(options: argparse.Namespace) -> output.Result | None:
    """Train on every rank; the result on rank 0."""
    # Built before the first run, so that a bad option is reported at once and not after minutes.
    recipe = Recipe(steps=options.steps, seed=options.seed)
    state = DynamiQState(bits=options.bits, schedule=options.schedule, backend=options.backend)
    operations(options.backend)
    picture = (options.out or FOLDER) / "loss.png"
    draws = options.out is not None or output.can_draw()
    if draws:
        output.check_picture(picture)
    if "RANK" not in os.environ:
        raise ConfigError(f"the demo runs on several ranks; start it as {LAUNCH}")
    _initialize()
    try:
        report = compare(state, recipe)
    finally:
        dist.destroy_process_group()
    if report is None:
        return None
    lines = (output.render(report.table()), output.to_json(report.figures()))
    return output.Result(report.figures(), "\n".join(lines), [partial(draw, report, picture if draws else None)])


def draw(report: Report, picture: Path | None) -> None:
    """Draw the loss curves, and say so once they are there, or why they are not."""
    if picture is not None:
        report.plot(picture)
    where = picture or f"not drawn, which needs {output.MATPLOTLIB}"
    print(f"loss curves: {where}", file=sys.stderr)


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


def _initialize() -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local))
    if str(local) == os.environ.get("WORLD_SIZE"):
        # Gloo listens where the host's name points, which on laptops and in containers is often nowhere.
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    join("gloo", timeout=TIMEOUT)
