"""What a run tells of itself: ranges in a profile, scalars for TensorBoard, and numbers that fit together."""

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dynamiq_ddp import DynamiQState, dynamiq_hook

RANGES = {"dynamiq: agreement", "dynamiq: statistics", "dynamiq: codec", "dynamiq: network"}


def trained(group, steps=3, **settings):
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    ddp = DistributedDataParallel(model, process_group=group)
    state = DynamiQState(process_group=group, min_compress_numel=0, **settings)
    ddp.register_comm_hook(state, dynamiq_hook)
    for _ in range(steps):
        ddp(torch.ones(2, 60) * (group.rank() + 1)).square().sum().backward()
    return state


def test_ranges_have_readable_names_in_a_profile(ddp_ranks):
    """On CPU the lanes are threads, which a profile contains only if it is told to look at all of them."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    # Without acc_events, torch 2.10 warns that it forgets what came before.
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, acc_events=True) as found:
        ddp_ranks(2, lambda group: trained(group).close())
    counts = {event.key: event.count for event in found.key_averages() if event.key.startswith("dynamiq")}
    assert set(counts) >= RANGES
    assert counts["dynamiq: codec"] >= 2 * 3  # at least once for each rank and step


def test_what_the_lanes_do_is_hidden_or_waited_for(ddp_ranks):
    """A lane's time falls before the end of the backward pass, or after it; nothing is counted twice or left out."""

    class Slow(torch.autograd.Function):
        """Waits in the backward pass until the lanes have done all that was begun."""

        @staticmethod
        def forward(ctx, x, waiting):
            ctx.waiting = waiting
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for pending in list(ctx.waiting()):
                pending.wait()
            return grad, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(60, 60), nn.Linear(60, 60)
            self.waiting = list

        def forward(self, x):
            return self.last(Slow.apply(self.first(x), self.waiting))

    def work(group):
        model = Model()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-6)
        state = DynamiQState(process_group=group, min_compress_numel=0, lanes=1)
        ddp.register_comm_hook(state, dynamiq_hook)
        model.waiting = lambda: state._pending
        spans = []
        for _ in range(3):
            ddp(torch.ones(2, 60)).square().sum().backward()
            stats = state.stats()
            busy = stats.seconds_agreement + stats.seconds_statistics + stats.seconds_codec + stats.seconds_network
            spans.append((stats.seconds_hidden, stats.seconds_exposed, busy))
        return spans

    for spans in ddp_ranks(2, work):
        (hidden, exposed, busy), (first_hidden, first_exposed, first_busy) = spans[-1], spans[0]
        assert hidden > first_hidden  # after DDP's rebuild, the last layer's buckets are reduced while the first waits
        assert exposed > first_exposed
        assert busy - first_busy <= (hidden - first_hidden) + (exposed - first_exposed)
