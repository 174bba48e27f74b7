"""What a rank's encodings lost: the sum over the ranks is what the sum of the gradients lost, at every coordinate."""

from __future__ import annotations

import pytest
import torch

from dynamiq_core import CodecConfig, ConfigError, DynamiQ, Encoding, InputError, Received
from dynamiq_core.baselines import BF16

CONFIGS = [CodecConfig(bits=2.5), CodecConfig.paper(bits=3.5), CodecConfig(bits=4.0, rounding="correlated")]


def plan_of(codec, rows, chunks):
    merged = codec.merge_statistics([codec.statistics(row) for row in rows])
    return codec.plan(merged, rows.shape[1], device=rows.device, workers=len(rows), chunks=chunks)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("numel", [5, 256, 2999])
def test_the_parts_of_all_ranks_are_the_error_of_the_sum(config, numel, normal):
    codec, n, chunks = DynamiQ(config), 3, 2
    decay = torch.logspace(0, -3, numel)  # unequal, so that some super-groups get width 0
    rows = torch.stack([normal(rank, numel) * decay + 0.2 for rank in range(n)])
    plan = plan_of(codec, rows, chunks)
    kept: list[list[Encoding]] = [[] for _ in range(n)]
    mean = torch.full((numel,), torch.nan)
    for chunk in range(chunks):
        received: tuple[Received, ...] = ()
        for rank in range(n):
            message = codec.decompress_accumulate_recompress(received, rows[rank], plan, chunk=chunk, slot=rank)
            kept[rank].append(Encoding(chunk, rank, received, message))
            received = (Received(message, rank),)
        codec.decompress(received[0].message, plan, chunk=chunk, slot=n - 1, out=mean)
    before = rows.clone()
    lost = torch.stack([codec.residual(kept[rank], rows[rank], plan) for rank in range(n)])
    assert torch.equal(rows, before)
    assert lost.dtype == torch.float32
    missing = rows.double().sum(dim=0) - n * mean.double()
    assert float((lost.double().sum(dim=0) - missing).abs().max()) <= 1e-5
    assert float(missing.abs().max()) > 1e-3  # else there was nothing to find

    # Of an encoding of one chunk alone, the coordinates of the other chunk lose nothing.
    parts = [codec.residual([encoding], rows[1], plan) for encoding in kept[1]]
    assert torch.equal(parts[0] + parts[1], lost[1])
    assert not torch.logical_and(parts[0] != 0, parts[1] != 0).any()


def test_arguments_that_do_not_fit_are_refused(normal):
    codec, x = DynamiQ(), normal(0, 300)
    plan = plan_of(codec, x[None], 1)
    with pytest.raises(InputError, match="299 coordinates, the plan is for 300"):
        codec.residual([], x[:299], plan)
    with pytest.raises(InputError, match="message of chunk 0"):
        codec.residual([Encoding(0, 0, (), torch.zeros(3, dtype=torch.uint8))], x, plan)


def test_a_codec_that_does_not_offer_it_says_so():
    codec = BF16()
    plan = codec.plan(None, 3, device=torch.device("cpu"), workers=1, chunks=1)
    with pytest.raises(ConfigError, match=r"BF16\(\) cannot tell what its encodings lose"):
        codec.residual([], torch.ones(3), plan)
