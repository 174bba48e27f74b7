"""dynamiq-core from its wheel, with nothing but what it depends on: a round trip."""

import torch
from absent import assert_absent

from dynamiq_core import CodecConfig, DynamiQ, vnmse

assert_absent("dynamiq_kernels", "dynamiq_transport", "dynamiq_ddp", "mpi4py", "numba")
codec = DynamiQ(CodecConfig(bits=5.0))
x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
plan = codec.plan(codec.statistics(x), x.numel(), device=x.device, workers=1, chunks=1)
message = codec.compress(x, plan, chunk=0, slot=0)
estimate = codec.decompress(message, plan, chunk=0, slot=0, out=torch.empty_like(x))
assert 4.0 < 8 * message.numel() / x.numel() <= 5.0
assert vnmse(estimate, x) < 0.01
