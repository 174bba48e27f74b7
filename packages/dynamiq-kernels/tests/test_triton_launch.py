"""Launching without a GPU: what a launch is compiled for, seen with a driver that only names a device.

Run as a program, this file launches every kernel for several sizes, keys, steps and slots, and prints how many programs
came out of it.
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

from dynamiq_core import CodecConfig, DynamiQ, Received


class Driver:
    """A device that can be compiled for and nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def programs() -> dict[str, int]:
    """How many programs every kernel was compiled to."""
    import triton

    triton.runtime.driver.set_active(Driver())
    from dynamiq_kernels import triton as kernels

    made: dict[str, set[str]] = {}

    def compile_only(kernel: Any, count: int, device: torch.device, /, **arguments: Any) -> None:
        options = {"SG": 4, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
        made.setdefault(kernel.fn.__name__, set()).add(kernel.warmup(grid=(4,), **arguments, **options).hash)

    for name in ("statistics", "hop", "accumulate", "finish"):
        module = importlib.import_module(f"dynamiq_kernels.triton.{name}")
        module.launch, module.check = compile_only, lambda *tensors: None  # type: ignore[attr-defined]

    cases = [(1, 0, 0, (0, 1)), (3, 16, 1, (1, 16)), (7, 2**64 - 16, 48, (16, 1)), (16, 5, 2**32 - 16, (2, 3))]
    for blocks, seed, step, (sender, slot) in cases:
        config, x = CodecConfig(seed=seed), torch.ones(4096 * blocks)
        reference, codec = DynamiQ(config), DynamiQ(config, operations=kernels)
        codec.statistics(x)
        plan = reference.plan(reference.statistics(x), x.numel(), device=x.device, workers=17, chunks=2, step=step)
        message = reference.compress(x, plan, chunk=1, slot=sender)
        received = [Received(message, sender)]
        codec.decompress_accumulate_recompress(received, x, plan, chunk=1, slot=slot)
        codec.decompress(message, plan, chunk=1, slot=sender, out=torch.empty_like(x))
        codec.decompress_accumulate(message, x.clone(), plan, chunk=1, slot=sender)
    return {name: len(hashes) for name, hashes in made.items()}


def test_no_kernel_is_compiled_for_the_value_of_a_size_a_key_a_step_or_a_slot() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == dict.fromkeys(
        ("statistics_kernel", "hop_kernel", "accumulate_kernel", "finish_kernel"), 1
    )


if __name__ == "__main__":
    print(json.dumps(programs()))
