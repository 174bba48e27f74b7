"""The Triton kernels against the reference, bit by bit, on a GPU or in Triton's interpreter.

Without a GPU the tests below are run by the first of them, in a process of its own: whether kernels are interpreted is
decided when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from dynamiq_core import BackendError, CodecConfig, DynamiQ, InputError, Received
from dynamiq_core.rounding import Key
from dynamiq_core.rounding import draws as reference_draws

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
philox = pytest.importorskip("dynamiq_kernels.triton.philox")
draws, signed = philox.draws, philox.signed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

run_here = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="neither a GPU nor TRITON_INTERPRET=1; run in a process of its own"
)


@pytest.mark.skipif(DEVICE.type == "cuda" or INTERPRETED, reason="the tests below run in this process")
def test_everything_below_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    command += ["-W", "ignore:Conversion of an array with ndim > 0:DeprecationWarning"]  # in Triton 3.6's interpreter
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def gradients(workers: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One gradient per worker; magnitudes differ between super-groups, and some of them have a mean."""
    generator = torch.Generator().manual_seed(numel)
    rows = -(-numel // 256)
    made = []
    for _ in range(workers):
        scale = torch.exp(1.5 * torch.randn(rows, 1, generator=generator))
        mean = torch.where(torch.arange(rows)[:, None] % 3 == 0, 1.5, 0.0)
        values = scale * (torch.randn(rows, 256, generator=generator) + mean)
        made.append(values.flatten()[:numel].to(dtype).contiguous())
    return made


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal bit by bit, but for the payload of NaN and the sign of zero."""
    return torch.equal(torch.nan_to_num(got.cpu(), nan=123.0), torch.nan_to_num(expected, nan=123.0))


def check(config: CodecConfig, xs: list[Tensor], *, chunks: int = 1, step: int = 3, bucket: int = 7) -> None:
    """Statistics, a chain of hops, the mean and the sum: all equal to the reference, outputs poisoned before."""
    from dynamiq_kernels import triton as kernels

    expected, codec = DynamiQ(config), DynamiQ(config, operations=kernels)
    there = [x.to(DEVICE) for x in xs]
    workers, numel = len(xs), xs[0].numel()
    rows = [expected.statistics(x) for x in xs]
    for x, row in zip(there, rows, strict=True):
        assert same(codec.statistics(x), row)
    merged = expected.merge_statistics(rows)
    shape = {"workers": workers, "chunks": chunks, "step": step, "bucket": bucket}
    plan = expected.plan(merged, numel, device=torch.device("cpu"), **shape)
    plan_there = codec.plan(merged.to(DEVICE), numel, device=DEVICE, **shape)
    mean, mean_there = torch.full_like(xs[0], -7.0), torch.full_like(there[0], -7.0)
    for chunk in range(chunks):
        sent: list[Received] = []
        for slot in range(workers):
            place = {"chunk": chunk, "slot": slot}
            received = sent[-2:] if slot == workers - 1 else sent[-1:]
            message = expected.decompress_accumulate_recompress(received, xs[slot], plan, **place)
            out = torch.full_like(message, 0xAA, device=DEVICE)
            moved = [Received(m.to(DEVICE), s) for m, s in received]
            codec.decompress_accumulate_recompress(moved, there[slot], plan_there, out=out, **place)
            assert torch.equal(out.cpu(), message), f"message of slot {slot}, chunk {chunk}"
            sent.append(Received(message, slot))
        expected.decompress(message, plan, out=mean, **place)
        codec.decompress(out, plan_there, out=mean_there, **place)
        assert same(mean_there, mean)
        total, total_there = xs[0].float(), there[0].float()
        expected.decompress_accumulate(message, total, plan, **place)
        codec.decompress_accumulate(out, total_there, plan_there, **place)
        assert same(total_there, total)


@run_here
@pytest.mark.parametrize("width", range(1, 9))
def test_every_width(width: int) -> None:
    check(CodecConfig(bits=width + 1, widths=(width,)), gradients(2, 300))


@run_here
@pytest.mark.parametrize("rounding", ["dithered", "correlated", "independent"])
@pytest.mark.parametrize("scales", ["log", "linear"])
def test_every_kind_of_scales_and_rounding(scales, rounding) -> None:
    check(CodecConfig(scales=scales, rounding=rounding, seed=2**64 - 1), gradients(3, 520), step=2**32 - 1)


@run_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 255, 256, 257, 264, 1000])
def test_every_size_and_dtype(numel: int, dtype: torch.dtype) -> None:
    check(CodecConfig(), gradients(2, numel, dtype))


@run_here
def test_all_widths_in_one_launch_over_several_chunks() -> None:
    check(CodecConfig(bits=3.7), gradients(4, 256 * 150), chunks=2)


@run_here
@pytest.mark.parametrize("config", [CodecConfig(), CodecConfig.paper()], ids=["default", "paper"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 3e38, 1e-30, 1e-45, 0.0])
def test_extreme_values(config: CodecConfig, value: float) -> None:
    xs = gradients(2, 600)
    xs[1][300] = value
    xs[0][16:32] = 0.0
    check(config, xs)
    check(config, [torch.full((300,), value), torch.zeros(300)])


@run_here
@pytest.mark.parametrize("workers", [2, 5, 8])
def test_chunks_slots_and_bends(workers: int) -> None:
    check(CodecConfig(bend=1.0 + workers / 4), gradients(workers, 256 * workers), chunks=workers)


@triton.jit
def draws_kernel(index, out, slot, seed_low, seed_high, step, bucket):
    lane = tl.arange(0, 32)[None, :]
    row = tl.arange(0, 4)[:, None]
    counter = (tl.load(index + row) * 32 + lane).to(tl.uint32, bitcast=True)
    draw = draws(counter, slot, (seed_low, seed_high, step, bucket), 0)
    at = row * 256 + lane * 8
    tl.store(out + at[None] + tl.arange(0, 8)[:, None, None], draw.to(tl.int32))


@run_here
def test_philox_words_are_the_references() -> None:
    """The published generator: words of kernel and reference for counters and keys with all bits in use."""
    key = Key(0xFEDCBA9876543210, 0xDEADBEEF, 0x89ABCDEF)
    super_groups = torch.tensor([0, 1, 2**26 + 5, 2**27 - 2])
    expected = reference_draws(key, super_groups, slot=5)
    out = torch.full((4, 256), -1, dtype=torch.int32, device=DEVICE)
    index = super_groups.to(torch.int32).to(DEVICE)
    words = (signed(word) for word in (key.seed, key.seed >> 32, key.step, key.bucket))
    draws_kernel[(1,)](index, out, 5, *words, num_warps=4)
    assert torch.equal(out.cpu().to(torch.int64), expected)


def test_importing_needs_no_gpu() -> None:
    code = "import dynamiq_kernels.triton as t; print(t.name)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout == "triton\n", run.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter computes on CPUs")
def test_a_cpu_tensor_without_the_interpreter_is_an_error() -> None:
    from dynamiq_kernels import triton as kernels

    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        kernels.statistics(torch.zeros(300))


@run_here
def test_a_message_at_an_odd_address_is_an_error() -> None:
    from dynamiq_kernels import triton as kernels

    codec, x = DynamiQ(operations=kernels), torch.ones(512, device=DEVICE)
    plan = codec.plan(codec.statistics(x), 512, device=DEVICE, workers=1, chunks=1)
    out = torch.empty(plan.sizes[0] + 1, dtype=torch.uint8, device=DEVICE)[1:]
    with pytest.raises(InputError, match="even address"):
        codec.compress(x, plan, chunk=0, slot=0, out=out)
