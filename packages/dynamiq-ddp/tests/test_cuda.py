"""The same on a GPU, with ranks that are threads of this process; skipped where there is none."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, all_reduce, dynamiq_hook, simulate
from dynamiq_ddp.backend import make_codec
from dynamiq_ddp.lanes import Lanes
from dynamiq_transport import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
def test_same_bits_as_on_the_cpu(schedule, random_rows, same_bits):
    rows = random_rows(4, 10_000)
    for codec in (BF16(), DynamiQ()):
        expected = simulate(rows, codec=codec, schedule=schedule).mean
        assert same_bits(simulate(rows.cuda(), codec=codec, schedule=schedule).mean.cpu(), expected)
    fused = make_codec(CodecConfig(), "auto", torch.device("cuda"))
    assert same_bits(simulate(rows.cuda(), codec=fused, schedule=schedule).mean.cpu(), expected)


def test_no_host_read(ranks, random_rows):
    rows = random_rows(3, 100_000).cuda()
    codec = make_codec(CodecConfig(), "auto", rows.device)
    simulate(rows, codec=codec)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = ranks(3, lambda t: all_reduce(rows[t.rank].clone(), transport=t, codec=codec, check=False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(result, torch.Tensor) for result in results), results
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_damaged_header_makes_the_result_nan_on_all_ranks(ranks, recorder, random_rows):
    rows = random_rows(3, 5000).cuda()

    def work(transport):
        def damage(number, peer, tensor):
            if transport.rank == 0 and number == 2:  # the first of the ring, after two of the statistics
                tensor[12] += 1

        return all_reduce(
            rows[transport.rank].clone(), transport=recorder(transport, damage), codec=DynamiQ(), check=False
        )

    for result in ranks(3, work):
        assert result.isnan().all()


def test_an_interrupt_while_enqueueing_is_raised_and_stops_the_lanes():
    lanes = Lanes([LocalTransport.group(1)[0]])

    def interrupt(lane):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.begin(0, interrupt, torch.ones(3, device="cuda"))
    with pytest.raises(RuntimeError, match="stopped by KeyboardInterrupt"):
        lanes.begin(1, interrupt, torch.ones(3, device="cuda"))
    lanes.close()


def test_the_hook_on_a_side_stream(tmp_path):
    """One process, and two ranks of which the other is a thread that plays the same part by hand."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mine, theirs = LocalTransport.group(2)
        state = DynamiQState(codec=BF16(), min_compress_numel=0, transport=lambda: mine)
        other = DynamiQState(codec=BF16(), min_compress_numel=0, transport=lambda: theirs)
        model = nn.Linear(64, 64, bias=False).cuda()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, dynamiq_hook)
        for step in range(3):
            peer = threading.Thread(target=lambda: other.begin(torch.zeros(64 * 64, device="cuda"), index=0).wait())
            peer.start()
            ddp.zero_grad()
            ddp(torch.full((1, 64), 2.0 * (step + 1), device="cuda")).sum().backward()
            grad = model.weight.grad.clone()
            peer.join()
            assert (grad == step + 1).all()
    finally:
        dist.destroy_process_group()
