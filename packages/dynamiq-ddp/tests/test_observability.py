"""What a run tells of itself: ranges in a profile, scalars for TensorBoard, and numbers that fit together."""

import torch
from torch import nn
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
    """As a user profiles a training loop, without options, though on CPU the work is done by other threads."""

    def work(group):
        if group.rank() > 0:
            trained(group)
            return None
        with profile(activities=[ProfilerActivity.CPU]) as found:
            trained(group)
        return {event.key: event.count for event in found.key_averages() if event.key.startswith("dynamiq")}

    counts, _ = ddp_ranks(2, work)
    assert set(counts) >= RANGES
    assert min(counts[name] for name in RANGES) >= 1
