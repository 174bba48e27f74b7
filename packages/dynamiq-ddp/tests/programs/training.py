"""Run by torchrun on three processes: what needs torch's default process group. Prints one JSON object per rank."""

import copy
import io
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError, DynamiQ, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, all_reduce, dynamiq_hook
from dynamiq_transport import TorchTransport

WIDTH = 40


def scalar():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def wrap(model, state, **options):
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(state, dynamiq_hook)
    return ddp


def exact_state(**settings):
    return DynamiQState(codec=BF16(), min_compress_numel=0, **settings)


def train(ddp, steps, *, first=0):
    """Some steps of SGD with momentum zero, so that parameters and the hook are all that is carried along."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def digest(tensor):
    """A number that tells bits apart."""
    weights = torch.arange(1, tensor.numel() + 1)
    return int((tensor.contiguous().view(torch.int32).to(torch.int64) * weights).sum())


def group_none_or_world():
    """For both schedules, the bits with no group and with the default one; and which backend it was."""
    found, backends = {}, set()
    for schedule in ("ring", "butterfly"):
        states = [
            DynamiQState(process_group=group, schedule=schedule, min_compress_numel=0)
            for group in (None, dist.group.WORLD)
        ]
        found[schedule] = [digest(train(wrap(network(), state), 2)) for state in states]
        backends |= {state.stats().backend for state in states}
    return [found, sorted(backends)]


def subgroup():
    """Averages over the members of a group that is not the default one, compressed and not."""
    pair, single = dist.new_group([1, 2]), dist.new_group([0])
    group, found = single if dist.get_rank() == 0 else pair, []
    for settings in ({}, {"schedule": "butterfly"}, {"min_compress_numel": 10}, {"measure_every": 1}):
        state = DynamiQState(**{"codec": BF16(), "min_compress_numel": 0, "process_group": group, **settings})
        ddp = wrap(scalar(), state, process_group=group)
        ddp(torch.full((1, 1), 2.0 * dist.get_rank())).sum().backward()
        found.append(float(ddp.module.weight.grad))
    return found


def join():
    state = exact_state()
    ddp, seen = wrap(scalar(), state), []
    with ddp.join():
        for _ in range(dist.get_rank() + 1):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 3.0)).sum().backward()
            seen.append(float(ddp.module.weight.grad))
    return [seen, state.steps]


def compiled():
    calls = []

    def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return dynamiq_hook(state, bucket)

    def bucketed(compile):
        """Two backward passes, of which the second is over the buckets that DDP has arranged anew."""
        calls.clear()
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.002)
        ddp.register_comm_hook(DynamiQState(min_compress_numel=0), counting)
        bits = digest(train(torch.compile(ddp, backend="eager") if compile else ddp, 2))
        return [bits, list(calls)]

    ddp = DistributedDataParallel(scalar())
    ddp.register_comm_hook(exact_state(), counting)
    torch.compile(ddp, backend="eager")(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return [float(ddp.module.weight.grad), list(calls), bucketed(False), bucketed(True)]


def copied():
    """Steps that the hook has seen after a backward pass of the model, of its copy, and of the copy with a hook."""
    state = exact_state()
    ddp = wrap(scalar(), state)
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    seen = [state.steps]
    twin = copy.deepcopy(ddp)
    for hooked in (False, True):
        if hooked:
            twin.register_comm_hook(state, dynamiq_hook)
        twin.zero_grad()
        twin(torch.full((1, 1), 3.0 * dist.get_rank())).sum().backward()
        seen += [state.steps, float(twin.module.weight.grad)]
    return seen


def fsdp():
    """What becomes of the hook when it is handed to FSDP, which gives its hooks two arguments or three."""
    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=strategy, device_id=torch.device("cpu"))
        model.register_comm_hook(exact_state(), dynamiq_hook)
        try:
            model(torch.ones(1, 4)).sum().backward()
        except InputError as error:
            found.append(str(error))
    return found


def without_buckets():
    """In this mode of the compiler DDP has none, and calls its hook with each gradient."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = wrap(scalar(), exact_state())
        try:
            torch.compile(ddp, backend="eager")(torch.ones(1, 1)).sum().backward()
        except InputError as error:
            return str(error)
    return "no error"


def divisor_of_join():
    """DDP leaves the division to a hook, which cannot know how many ranks are still there."""
    results = []
    for hook in (dynamiq_hook, allreduce_hook):
        ddp = DistributedDataParallel(scalar())
        ddp.register_comm_hook(exact_state() if hook is dynamiq_hook else None, hook)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + (dist.get_rank() == 0)):
                ddp.zero_grad()
                ddp(torch.full((1, 1), 3.0)).sum().backward()
                results.append(float(ddp.module.weight.grad))
    return results


def resumed():
    """Six steps with error feedback, against three, a checkpoint, and three more in a new process's worth of objects.

    DDP arranges its buckets anew after the first backward pass. The new model makes one before it loads the
    checkpoint, so that it has the arrangement of the old one.
    """
    settings = {"min_compress_numel": 0, "bits": 3.0, "error_feedback": True}
    whole = digest(train(wrap(network(), DynamiQState(**settings)), 6))
    state = DynamiQState(**settings)
    ddp = wrap(network(), state)
    train(ddp, 3)
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "state": state.state_dict(), "pickled": state}, file)
    results = []
    for kind in ("state", "pickled"):
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        state = DynamiQState(**settings) if kind == "state" else saved["pickled"]
        steps = state.steps
        ddp = wrap(network(), state)
        train(ddp, 1, first=50)
        ddp.module.load_state_dict(saved["model"])
        state.load_state_dict(saved["state"])
        results.append([steps, digest(train(ddp, 3, first=3))])
    return [whole, *results]


def rebound():
    """A state that was pickled with a process group uses the default group afterwards, and says so."""
    state = exact_state(process_group=dist.group.WORLD)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = torch.load(file, weights_only=False)
    ddp = wrap(scalar(), state)
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return [float(ddp.module.weight.grad), [str(w.message) for w in caught]]


def first_traffic():
    """The first thing that a new group carries is the all-reduce, between ranks of which not all are neighbours."""
    x = torch.full((5,), float(dist.get_rank()))
    with TorchTransport.dedicated() as transport:
        return all_reduce(x, transport=transport, codec=DynamiQ()).tolist()


CHECKS = (
    group_none_or_world,
    subgroup,
    join,
    divisor_of_join,
    compiled,
    copied,
    resumed,
    rebound,
    first_traffic,
    fsdp,
    without_buckets,  # the last one, as torch changes its compiler's settings for it and leaves them so
)


def main():
    early = exact_state()
    try:
        early.begin(torch.ones(3), index=0)
    except ConfigError as error:
        before = str(error)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {"before": before}
    for check in CHECKS:
        found[check.__name__] = check()
    ddp = wrap(scalar(), early)
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    found["made_early"] = float(ddp.module.weight.grad)
    # The same state goes on with the next default group, which torch wants to meet in another place.
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size)
    ddp = wrap(scalar(), early)
    ddp(torch.full((1, 1), dist.get_rank() + 2.0)).sum().backward()
    found["after_another_init"] = float(ddp.module.weight.grad)
    os.write(1, f"\n{json.dumps(found)}\n".encode())  # in one piece, on a line that Gloo has not begun
    # No clean-up and no barrier: a process may end as soon as its backward pass has returned.


if __name__ == "__main__":
    main()
