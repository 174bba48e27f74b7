"""dynamiq-ddp from its wheel, without extras: an all-reduce of three threads, and what the command line says."""

import json
import subprocess
import sys
from importlib.metadata import version

import torch
from absent import assert_absent

from dynamiq_core import DynamiQ, vnmse
from dynamiq_ddp import all_reduce
from dynamiq_transport import Transport, run_local

assert_absent("matplotlib", "mpi4py", "numba")
rows = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0))


def average(transport: Transport) -> torch.Tensor:
    return all_reduce(rows[transport.rank].clone(), transport=transport, codec=DynamiQ())


means = run_local(3, average)
assert torch.equal(means[0], means[1])
assert torch.equal(means[0], means[2])
assert vnmse(means[0], rows.mean(dim=0)) < 0.05


def say(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


report = json.loads(say("dynamiq-ddp", "doctor", "--json"))
assert report["versions"]["dynamiq-ddp"] == version("dynamiq-ddp")
assert report["versions"]["matplotlib"] is None
assert report["chosen"]["backend"] == ("triton" if len(report["devices"]) > 1 else "reference")
assert say(sys.executable, "-m", "dynamiq_ddp", "--version") == f"dynamiq-ddp {version('dynamiq-ddp')}\n"
assert "complete " in say("dynamiq-ddp", "completion", "bash")
