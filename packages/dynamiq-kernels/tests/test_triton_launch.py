"""Launching without a GPU: what a launch is compiled for, seen with a driver that only names a device.

Run as a program, this file launches every kernel for several sizes, keys, steps and slots, and prints how many programs
came out of it, and what a plan takes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynamiq_core import CodecConfig, DynamiQ, Received

KERNELS = ["statistics", "hop", "accumulate", "finish"]
OF_A_PLAN = ["energies", "relative", "rungs", "keys", "rows"]
NOTHING = (
    "empty",
    "select",
    "unbind",
    "view",
    "detach",
    "expand",
    "unsqueeze",
    "permute",
    "lift_fresh",
    "scalar_tensor",
)
"""Operations of torch that start nothing on a device: they allocate, look at what is there, or stay on the host."""


class Driver:
    """A device that can be compiled for and nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(NOTHING):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def programs() -> dict[str, Any]:
    """How many programs every kernel was compiled to, and what torch and Triton start on a device for a plan."""
    import triton

    triton.runtime.driver.set_active(Driver())
    from dynamiq_kernels import triton as kernels

    made: dict[str, set[str]] = {}
    launched: list[str] = []

    def compile_only(
        kernel: Any, count: int, device: torch.device, /, *, at_a_time: int = 4, warps: int = 4, **arguments: Any
    ) -> None:
        options = {"SG": at_a_time, "num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
        launched.append(kernel.fn.__name__)
        made.setdefault(launched[-1], set()).add(kernel.warmup(grid=(4,), **arguments, **options).hash)

    for name in (*KERNELS, "plan"):
        module = importlib.import_module(f"dynamiq_kernels.triton.{name}")
        module.launch, module.check = compile_only, lambda *tensors: None  # type: ignore[attr-defined]

    cases = [(1, 0, 0, (0, 1)), (3, 16, 1, (1, 16)), (7, 2**64 - 16, 48, (16, 1)), (16, 5, 2**32 - 16, (2, 3))]
    for blocks, seed, step, (sender, slot) in cases:
        config, x = CodecConfig(seed=seed), torch.ones(4096 * blocks + blocks // 2 * 256)
        reference, codec = DynamiQ(config), DynamiQ(config, operations=kernels)
        codec.statistics(x)
        statistics = reference.statistics(x)
        for _ in range(2):  # first with tables, which are kept
            launched.clear()
            with Operations() as taken:
                codec.plan(statistics, x.numel(), device=x.device, workers=blocks + 15, chunks=blocks, step=step)
        with Operations() as of_the_reference:
            reference.plan(statistics, x.numel(), device=x.device, workers=blocks + 15, chunks=blocks, step=step)
        started = launched + taken.names
        plan = reference.plan(statistics, x.numel(), device=x.device, workers=17, chunks=2, step=step)
        message = reference.compress(x, plan, chunk=1, slot=sender)
        received = [Received(message, sender)]
        for count in (1, blocks + 2):  # from three on they share a program
            codec.decompress_accumulate_recompress(count * received, x, plan, chunk=1, slot=slot)
        codec.decompress(message, plan, chunk=1, slot=sender, out=torch.empty_like(x))
        codec.decompress_accumulate(message, x.clone(), plan, chunk=1, slot=sender)
    return {
        "programs": {name: len(hashes) for name, hashes in made.items()},
        "started for a plan": started,
        "started by the reference": of_the_reference.names,
    }


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_no_kernel_is_compiled_for_the_value_of_a_size_a_key_a_step_or_a_slot(found) -> None:
    expected = dict.fromkeys((f"{name}_kernel" for name in (*KERNELS, *OF_A_PLAN)), 1)
    assert found["programs"] == expected | {"hop_kernel": 2}  # for one message, and for three and more


def test_a_plan_starts_eight_things_on_a_device(found) -> None:
    """Each costs a launch."""
    kernels = [f"{name}_kernel" for name in OF_A_PLAN]
    assert sorted(found["started for a plan"]) == sorted([*kernels, "zeros", "sort", "sort"])
    assert len(found["started by the reference"]) > 150


if __name__ == "__main__":
    print(json.dumps(programs()))
