"""dynamiq-kernels from its wheel, without extras: the reference is all that a CPU has."""

import torch
from absent import assert_absent

from dynamiq_core import DynamiQ
from dynamiq_kernels import available_backends, operations

assert_absent("dynamiq_transport", "dynamiq_ddp", "mpi4py", "numba")
assert list(available_backends("cpu")) == ["reference"]
x = torch.ones(1000)
rows = DynamiQ(operations=operations("auto", "cpu")).statistics(x)
assert rows is not None
assert rows.shape == (4, 2)
