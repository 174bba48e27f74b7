"""dynamiq-transport from its wheel, without mpi4py: a message around a ring of threads."""

import torch
from absent import assert_absent

from dynamiq_transport import Transport, ring, run_local

assert_absent("dynamiq_core", "dynamiq_kernels", "dynamiq_ddp", "mpi4py", "numba")


def pass_on(transport: Transport) -> int:
    received = torch.empty(3, dtype=torch.uint8)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    transport.exchange([(after, torch.full_like(received, transport.rank))], [(before, received)]).wait()
    return int(received[0])


assert run_local(3, pass_on) == [2, 0, 1]
assert len(ring(0, 3).reduce) == 2
