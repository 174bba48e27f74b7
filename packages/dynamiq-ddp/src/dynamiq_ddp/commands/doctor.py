"""``dynamiq-ddp doctor``: what is installed here, and what would run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from dynamiq_kernels import available_backends, operations

PACKAGES = (
    "dynamiq-core",
    "dynamiq-kernels",
    "dynamiq-transport",
    "dynamiq-ddp",
    "torch",
    "triton",
    "numba",
    "mpi4py",
)


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser("doctor", help="what is installed here, and what would run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the report."""
    report = doctor()
    print(json.dumps(report) if options.json else _as_text(report))


def doctor() -> dict[str, object]:
    """What this machine offers: versions, devices, the backends on each with the one that ``"auto"`` takes, transports.

    Nothing is started and no device is initialised beyond asking for its name.
    """
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": {device: _describe(device) for device in devices},
        "backends": {device: list(available_backends(device)) for device in devices},
        "auto": {device: operations("auto", device).name for device in devices},
        "transports": _transports(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def _transports() -> dict[str, bool]:
    return {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": importlib.util.find_spec("mpi4py") is not None,
    }


def _as_text(report: dict[str, object]) -> str:
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key:<18} {_as_words(entry)}" for key, entry in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _as_words(entry: object) -> str:
    if isinstance(entry, list):
        return ", ".join(map(str, entry))
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return "not installed" if entry is None else str(entry)
