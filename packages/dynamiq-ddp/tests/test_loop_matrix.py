"""Ways to write a training loop, each over two schedules and two numbers of ranks: gradients against stock DDP's.

`test_loops.py` looks at single features with values that arrive exactly. Here real messages are compressed, and what
comes out is within what the codec says, and the same on all ranks.

Ranks are threads. A few loops need processes, and for those this file is also the program that runs in them: six
processes, of which two and four make a subgroup each.
"""

import multiprocessing
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dynamiq_ddp import DynamiQState, dynamiq_hook

WIDTH = 40
STEPS = 3
SCHEDULES = ("ring", "butterfly")
SUBGROUPS = {2: (0, 3), 4: (1, 2, 4, 5)}


class Run(NamedTuple):
    """One rank of a run, with the hook or without."""

    group: dist.ProcessGroup
    settings: dict | None
    states: list

    @property
    def rank(self):
        return self.group.rank()

    def wrap(self, model, **options):
        ddp = DistributedDataParallel(model, process_group=self.group, **{"bucket_cap_mb": 0.008, **options})
        if self.settings is not None:
            self.states.append(DynamiQState(process_group=self.group, min_compress_numel=0, **self.settings))
            ddp.register_comm_hook(self.states[-1], dynamiq_hook)
        return ddp

    def x(self, step, width=WIDTH):
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(6, width, generator=generator)


def fill(model, width=WIDTH):
    """Parameters that do not depend on the global generator, which the ranks' threads share."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) / width**0.5
            parameter.copy_(values.to(parameter.dtype))
    return model


def network(width=WIDTH):
    return fill(nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]), width)


def gradients(module):
    return [None if p.grad is None else p.grad.detach().to_dense().clone() for p in module.parameters()]


def passes(run, ddp, *, width=WIDTH, steps=STEPS, **zero):
    seen = []
    for step in range(steps):
        ddp.zero_grad(**zero)
        ddp(run.x(step, width)).square().sum().backward()
        seen += gradients(ddp)
    return seen


def plain_and_rebuilt(run):
    return passes(run, run.wrap(network()))


def bucket_views(run):
    return passes(run, run.wrap(network(), gradient_as_bucket_view=True), set_to_none=False)


def static_graph(run):
    return passes(run, run.wrap(network(), static_graph=True))


def accumulation(run):
    ddp, seen = run.wrap(network()), []
    for step in range(STEPS):
        ddp.zero_grad()
        for part in range(3):
            with nullcontext() if part == 2 else ddp.no_sync():
                ddp(run.x(10 * step + part)).square().sum().backward()
        seen += gradients(ddp)
    return seen


class Branching(nn.Module):
    """Of three branches, the first is used everywhere, the second on rank 0 only, and the third nowhere."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.branches = rank, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.branches[0](x) + (self.branches[1](x) if self.rank == 0 else 0)


def unused_parameters(run):
    seen = passes(run, run.wrap(fill(Branching(run.rank)), find_unused_parameters=True), set_to_none=True)
    assert [gradient is None for gradient in seen] == [False, False, False, False, True, True] * STEPS
    return seen


def optimiser_and_clipping(run):
    """Momentum and the clipped norm are made of the gradients, and end in the parameters."""
    ddp = run.wrap(network())
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(run.x(step)).square().sum().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
        optimizer.step()
    return [p.detach() - first for p, first in zip(ddp.parameters(), before, strict=True)]


def scaled_loss_with_an_overflow(run):
    ddp = run.wrap(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    seen = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        x = run.x(step)
        if step == 1 and run.rank == 1:
            x[0, 0] = torch.inf
        scaler.scale(ddp(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            seen += gradients(ddp)
        scaler.step(optimizer)
        scaler.update()
        if run.settings is not None:
            run.states[0].loss_scale = scaler.get_scale()
    assert scaler.get_scale() == 512.0
    return seen


class Mixed(nn.Module):
    """Parameters of several dtypes, one of them complex, one empty and one frozen, and a sparse embedding."""

    def __init__(self):
        super().__init__()
        self.single, self.brain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.exact = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.rotation = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))
        self.empty, self.frozen = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.ones(5), requires_grad=False)
        self.sparse = nn.Embedding(30, WIDTH, sparse=True)

    def forward(self, x):
        x = self.single(x) + self.brain(x.bfloat16()).float() + self.exact(x.double()).float()
        rows = self.sparse(torch.arange(x.shape[0]) + int(x[0, 0] > 0))
        return x * torch.view_as_real(self.rotation).sum(dim=1) + self.empty.sum() + self.frozen.sum() + rows


def mixed_parameters(run):
    return passes(run, run.wrap(fill(Mixed()), bucket_cap_mb=25))


def several_models(run):
    models = [run.wrap(network()) for _ in range(2)]
    seen = []
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
        models[1](models[0](run.x(step))).square().sum().backward()
        seen += [gradient for model in models for gradient in gradients(model)]
    return seen


def an_error_and_another_pass(run):
    ddp = run.wrap(network())
    passes(run, ddp, steps=2)
    x = run.x(0).requires_grad_()
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(x).square().sum().backward()
    # DDP itself cannot go on after an error, nor can its parameters in another one; the state can.
    again = DistributedDataParallel(network(), process_group=run.group, bucket_cap_mb=0.008)
    if run.settings is not None:
        again.register_comm_hook(run.states[0], dynamiq_hook)
    return passes(run, again)


class Checkpointed(nn.Module):
    """Computes every part again in the backward pass; the reentrant way in backward passes of their own."""

    def __init__(self, *, reentrant):
        super().__init__()
        layers = network()
        self.parts, self.reentrant = nn.ModuleList(layers[i : i + 2] for i in range(0, len(layers), 2)), reentrant

    def forward(self, x):
        x.requires_grad_()  # without which the reentrant way makes no graph
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def activation_checkpoints(run):
    return passes(run, run.wrap(Checkpointed(reentrant=False)))


def reentrant_checkpoints(run):
    return passes(run, run.wrap(Checkpointed(reentrant=True)))


THREADED = [
    plain_and_rebuilt,
    bucket_views,
    static_graph,
    accumulation,
    unused_parameters,
    optimiser_and_clipping,
    scaled_loss_with_an_overflow,
    mixed_parameters,
    several_models,
    an_error_and_another_pass,
    activation_checkpoints,
    reentrant_checkpoints,
]


def uneven_inputs(run):
    """The first rank goes on longest, and the others contribute nothing to its last steps."""
    ddp, seen = run.wrap(network()), []
    with ddp.join():
        for step in range(run.group.size() - run.rank):
            ddp.zero_grad()
            ddp(run.x(step)).square().sum().backward()
            seen += gradients(ddp)
    return seen


def compiled(run):
    """Both ways round. The graph is cut where buckets end, of which the first must have 1 MB at least."""
    ddp = torch.compile(run.wrap(network(400), bucket_cap_mb=1), backend="aot_eager")
    inner = run.wrap(torch.compile(network(400), backend="aot_eager"), bucket_cap_mb=1)
    return passes(run, ddp, width=400) + passes(run, inner, width=400)


IN_PROCESSES = [plain_and_rebuilt, uneven_inputs, compiled]
"""In a subgroup, over torch's table of groups, and with a compiler whose state all threads would share."""


def settings(schedule, *, feedback):
    return {"bits": 8.0, "schedule": schedule, "error_feedback": feedback}


def outcome(loop, group, settings):
    """What a rank's loop gives, and how far it may be off as a part of the energy."""
    run = Run(group, settings, [])
    found = loop(run)
    return found, max((state.stats().predicted_vnmse for state in run.states), default=0.0)


def check(results, expected, *, feedback):
    """All ranks of a run against one rank of another, that had no hook.

    A rank that has run out of data has fewer gradients than the first.
    """
    found, predicted = results[0]
    for other, _ in results:
        pairs = zip(found, other, strict=False)
        assert all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    # With error feedback, the last step's errors come on top.
    bound = (4 if feedback else 2) * predicted**0.5
    assert 0 < bound < 0.5
    error = energy = 0.0
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            wide = torch.complex128 if a.is_complex() else torch.float64
            error += float((a.to(wide) - b.to(wide)).abs().square().sum())
            energy += float(b.to(wide).abs().square().sum())
    assert 0 < error**0.5 <= bound * energy**0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("loop", THREADED, ids=lambda loop: loop.__name__)
def test_gradients_are_those_of_stock_ddp_within_the_bound(loop, n, schedule, ddp_ranks):
    expected = ddp_ranks(n, lambda group: loop(Run(group, None, [])))[0]
    for feedback in (False, True):
        with_hook = settings(schedule, feedback=feedback)
        results = ddp_ranks(n, lambda group, with_hook=with_hook: outcome(loop, group, with_hook))
        assert len({len(found) for found, _ in results}) == 1
        check(results, expected, feedback=feedback)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """Where the processes have left what they found."""
    folder = tmp_path_factory.mktemp("loops")
    status, _, errors = run_program([sys.executable, __file__, str(folder)], timeout=280)
    assert status == 0, errors[-6000:]
    return folder


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", SUBGROUPS)
@pytest.mark.parametrize("loop", IN_PROCESSES, ids=lambda loop: loop.__name__)
def test_gradients_of_processes_are_those_of_stock_ddp_within_the_bound(loop, n, schedule, folder):
    ranks = [torch.load(folder / f"{loop.__name__} {rank}", weights_only=False) for rank in SUBGROUPS[n]]
    expected, _ = ranks[0]["plain"]
    for feedback in (False, True):
        results = [found[f"{schedule} {feedback}"] for found in ranks]
        lengths = [len(found) // len(list(network().parameters())) for found, _ in results]
        assert lengths == (list(range(n, 0, -1)) if loop is uneven_inputs else [lengths[0]] * n)
        check(results, expected, feedback=feedback)


def process(rank, folder):
    """One of the six: every loop in its subgroup, with the hook and without."""
    size = sum(map(len, SUBGROUPS.values()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    made = [(dist.new_group(list(members)), members) for members in SUBGROUPS.values()]
    (group,) = [group for group, members in made if rank in members]
    for loop in IN_PROCESSES:
        found = {"plain": outcome(loop, group, None)}
        for schedule in SCHEDULES:
            for feedback in (False, True):
                with_hook = settings(schedule, feedback=feedback)
                found[f"{schedule} {feedback}"] = outcome(loop, group, with_hook)
        torch.save(found, Path(folder, f"{loop.__name__} {rank}"))


def main():
    # Forked, so that torch is imported once.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=process, args=(rank, sys.argv[1]), daemon=True) for rank in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
