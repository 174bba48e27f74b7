"""Say what is installed here, what can run on this machine, and what would be chosen if nothing else is asked for.

    dynamiq-ddp doctor
    torchrun --nproc-per-node 2 --no-python dynamiq-ddp doctor      # as a launcher's ranks see it; rank 0 prints

It prints the versions of the packages, with the extra that brings what is not installed; the devices, and on each the
backends that can run, or why not; the transports; which MPI library mpi4py is bound to; what has launched this
process; and which device, backend, transport and schedule DynamiQ takes by itself. Nothing is measured, and no rank is
contacted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import torch
import torch.distributed as dist

from dynamiq_core import DynamiQError
from dynamiq_ddp.connect import LANES
from dynamiq_ddp.launched import default_transport, launcher
from dynamiq_ddp.state import DynamiQState
from dynamiq_kernels import Backend, operations

from . import output

PACKAGES = {
    "dynamiq-core": None,
    "dynamiq-kernels": None,
    "dynamiq-transport": None,
    "dynamiq-ddp": None,
    "torch": None,
    "numpy": None,
    "triton": "triton",
    "numba": "cpu",
    "mpi4py": "mpi",
    "matplotlib": "plot",
    "safetensors": "safetensors",
}
"""What is looked for, and the extra of dynamiq-ddp that brings it."""

BACKENDS = tuple(name for name in get_args(Backend) if name != "auto")

ASK_MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, numbers = MPI.get_vendor()
print(json.dumps({
    "flavour": name,
    "version": ".".join(map(str, numbers)),
    "standard": "{}.{}".format(*MPI.Get_version()),
    "library": " ".join(MPI.Get_library_version().splitlines()[0].split()),
}))
"""


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="what is installed here, and what would run", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, on_every_rank=False)
    return parser


def run(options: argparse.Namespace) -> output.Result:
    """Look around."""
    report = doctor()
    return output.Result(report, _as_text(report))


def doctor() -> dict[str, Any]:
    """What this machine offers, and what DynamiQ would choose; JSON types only.

    No GPU is initialised beyond asking for its properties.
    """
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    obstacles = {device: {name: _obstacle(name, device) for name in BACKENDS} for device in devices}
    auto = {device: _auto(device) for device in devices}
    mpi = _mpi() if version_of("mpi4py") else None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "devices": {device: _describe(device) for device in devices},
        "backends": {
            device: sorted((name for name, why in found.items() if why is None), key=lambda name: name != auto[device])
            for device, found in obstacles.items()
        },
        "obstacles": {
            device: {name: why for name, why in found.items() if why is not None} for device, found in obstacles.items()
        },
        "auto": auto,
        "transports": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "mpi": mpi is not None and "problem" not in mpi,
        },
        "mpi": mpi,
        "mpiexec": shutil.which("mpiexec"),
        "launcher": launcher(),
        "chosen": _chosen(devices[1] if len(devices) > 1 else "cpu", auto),
    }


def version_of(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _obstacle(backend: Any, device: str) -> str | None:
    """Why a backend does not run on a device; it is imported to know."""
    try:
        operations(backend, device)
    except DynamiQError as error:
        return str(error).partition(": ")[2] or str(error)
    return None


def _auto(device: str) -> str | None:
    """What ``"auto"`` takes, or None where that cannot be imported."""
    try:
        return operations("auto", device).name
    except DynamiQError:
        return None


def _mpi() -> dict[str, str]:
    """What mpi4py is bound to, asked in a process of its own, which an MPI library that does not fit may end."""
    try:
        asked = subprocess.run([sys.executable, "-c", ASK_MPI], capture_output=True, text=True, timeout=60, check=False)
        return dict(json.loads(asked.stdout))
    except subprocess.TimeoutExpired:
        return {"problem": "the library did not answer within 60 seconds"}
    except ValueError:
        said = asked.stderr.strip() or f"the process ended with status {asked.returncode}"
        return {"problem": said.splitlines()[-1]}


def _chosen(device: str, auto: dict[str, str | None]) -> dict[str, Any]:
    """What DynamiQ takes if nothing else is asked for."""
    defaults = inspect.signature(DynamiQState).parameters
    return {
        "device": device,
        "backend": auto[device],
        "transport": default_transport(),
        "schedule": defaults["schedule"].default,
        "bits_per_coordinate": defaults["bits"].default,
        "lanes": LANES[torch.device(device).type],
    }


def _as_text(report: dict[str, Any]) -> str:
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key:<20} {_as_words(name, key, entry)}" for key, entry in value.items() if entry != {}]
        else:
            lines.append(f"{name}: {_as_words('', name, value)}")
    return "\n".join(lines)


def _as_words(section: str, key: str, entry: Any) -> str:
    if section == "versions" and entry is None:
        extra = PACKAGES.get(key)
        return "not installed" + (f'; pip install "dynamiq-ddp[{extra}]"' if extra else "")
    if isinstance(entry, dict):
        return "; ".join(f"{name}: {_as_words(section, name, value)}" for name, value in entry.items())
    if isinstance(entry, list):
        return ", ".join(map(str, entry))
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    if key == "memory_bytes":
        return f"{entry / 2**30:.1f} GiB"
    return "none" if entry is None else str(entry)
