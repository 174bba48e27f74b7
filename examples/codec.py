"""The arithmetic alone: what bits cost in accuracy, and what four workers' gradients become without any network.

    python examples/codec.py

Needs dynamiq-core.
"""

import torch

from dynamiq_core import CodecConfig, DynamiQ, Received, vnmse

D = 100_000
WORKERS = 4

generator = torch.Generator().manual_seed(0)
# Gradients are uneven: some parts are much louder than others, and that is where the bits go.
loudness = torch.exp(torch.randn(D // 250, generator=generator)).repeat_interleave(250)
gradients = loudness * torch.randn(WORKERS, D, generator=generator)
exact = gradients.mean(dim=0)

for bits in (3.0, 4.0, 5.0, 6.0):
    codec = DynamiQ(CodecConfig(bits=bits))
    # Phase 1: every worker's statistics, merged, tell all of them the same bit widths.
    statistics = codec.merge_statistics([codec.statistics(gradient) for gradient in gradients])
    plan = codec.plan(statistics, D, device=gradients.device, workers=WORKERS, chunks=1)
    # Phase 2: the partial sum passes from worker to worker, and is compressed again at each.
    message = codec.compress(gradients[0], plan, chunk=0, slot=0)
    for rank in range(1, WORKERS):
        received = [Received(message, rank - 1)]
        message = codec.decompress_accumulate_recompress(received, gradients[rank], plan, chunk=0, slot=rank)
    mean = codec.decompress(message, plan, chunk=0, slot=WORKERS - 1, out=torch.empty(D))
    print(f"{bits:.1f} bits: messages of {message.numel()} bytes instead of {4 * D}, vNMSE {vnmse(mean, exact):.1e}")
