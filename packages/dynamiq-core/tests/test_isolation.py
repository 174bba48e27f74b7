"""The researcher's promise: the arithmetic alone, with no other rank, compiler or package in sight."""

from __future__ import annotations

import subprocess
import sys

FOREIGN = ("dynamiq_ddp", "dynamiq_kernels", "dynamiq_transport", "mpi4py", "numba", "triton")

IMPORT_EVERYTHING = """
import pkgutil, sys
import torch

class Forbidden:
    def __getattr__(self, name):
        raise ImportError(f"torch.distributed.{name} was used")

# torch imports its own torch.distributed; from here on nobody gets at it.
for name in [name for name in sys.modules if name.partition("torch.distributed")[1]]:
    sys.modules[name] = None
torch.distributed = Forbidden()
for name in sys.argv[1:]:
    sys.modules[name] = None

import dynamiq_core
for module in pkgutil.walk_packages(dynamiq_core.__path__, "dynamiq_core."):
    __import__(module.name)
    print(module.name)
"""


def test_every_module_imports_without_distributed_and_without_the_other_packages() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EVERYTHING, *FOREIGN], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "dynamiq_core.protocol" in run.stdout.split()
