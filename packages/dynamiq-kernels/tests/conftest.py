"""Backends under test, and a step of an all-reduce run on a backend and on the reference side by side.

Shapes: d coordinates, M super-groups, n workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, Operations, Received
from dynamiq_kernels import available_backends, operations

POISON = 0xAA

INTERPRETED_NUMEL = 600
"""Most coordinates that Triton's interpreter gets: it takes a good part of a second for each super-group."""


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, every NaN the same."""
    if not x.is_floating_point():
        return x.cpu()
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(x.isnan(), -1, x.view(integer)).cpu()


@dataclass(frozen=True)
class Subject:
    """A backend under test, and where its tensors live."""

    operations: Operations
    device: torch.device

    def skip_if_slow(self, numel: int) -> None:
        """Leave large tensors to compiled backends."""
        if self.operations.name == "triton" and self.device.type == "cpu" and numel > INTERPRETED_NUMEL:
            pytest.skip(f"Triton's interpreter would take minutes for {numel} coordinates")

    def check_step(
        self, config: CodecConfig, gradients: Sequence[Tensor], *, chunks: int = 1, step: int = 3, bucket: int = 1
    ) -> DynamiQPlan:
        """Run the chain of hops of one all-reduce on the backend and on the reference, and compare all their results.

        The first encoding is of a gradient alone, the last one of a gradient and two messages.

        Args:
            config: the codec's parameters.
            gradients: n tensors [d] of one dtype, on the CPU.
            chunks: number of chunks.
            step: of the random numbers.
            bucket: of the random numbers.

        Returns:
            The plan, for a look at what it covers.
        """
        reference, codec = DynamiQ(config), DynamiQ(config, operations=self.operations)
        there = [x.to(self.device) for x in gradients]
        workers, numel = len(gradients), gradients[0].numel()

        rows = [reference.statistics(x) for x in gradients]
        for i in range(workers):
            assert torch.equal(bits(codec.statistics(there[i])), bits(rows[i])), f"statistics of worker {i}"
        plan, plan_there = (
            c.plan(
                reference.merge_statistics(rows),
                numel,
                device=device,
                workers=workers,
                chunks=chunks,
                step=step,
                bucket=bucket,
            )
            for c, device in ((reference, gradients[0].device), (codec, self.device))
        )

        out, out_there = torch.full_like(gradients[0], torch.nan), torch.full_like(there[0], torch.nan)
        for chunk in range(chunks):
            sent: list[Received] = []
            for slot in range(workers):
                received = sent[-2:] if slot == workers - 1 else sent[-1:]
                message = reference.decompress_accumulate_recompress(
                    received, gradients[slot], plan, chunk=chunk, slot=slot
                )
                message_there = codec.decompress_accumulate_recompress(
                    [Received(m.to(self.device), s) for m, s in received],
                    there[slot],
                    plan_there,
                    chunk=chunk,
                    slot=slot,
                    out=torch.full_like(message, POISON, device=self.device),
                )
                assert torch.equal(bits(message_there), message), f"message of slot {slot} in chunk {chunk}"
                sent.append(Received(message, slot))

            reference.decompress(message, plan, chunk=chunk, slot=slot, out=out)
            codec.decompress(message_there, plan_there, chunk=chunk, slot=slot, out=out_there)
            assert torch.equal(bits(out_there), bits(out)), f"mean of chunk {chunk}, other chunks untouched"

            total, total_there = (x[0].to(torch.float32).clone() for x in (gradients, there))
            reference.decompress_accumulate(message, total, plan, chunk=chunk, slot=slot)
            codec.decompress_accumulate(message_there, total_there, plan_there, chunk=chunk, slot=slot)
            # Adding nothing or adding a zero: the sign of zeros may differ.
            assert torch.equal(bits(total_there + 0.0), bits(total + 0.0)), f"sum with chunk {chunk}"
        for x, before in zip(there, gradients, strict=True):
            assert torch.equal(bits(x), bits(before)), "gradients are not written"
        return plan


@pytest.fixture(scope="session", params=["numba", "triton"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every compiled backend that can run here."""
    device = torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu")
    if request.param not in available_backends(device):
        needed = {"numba": "Numba", "triton": "Triton, and a GPU or TRITON_INTERPRET=1 in the environment"}
        pytest.skip(f"needs {needed[request.param]}")
    return Subject(operations(request.param, device), device)


@pytest.fixture(scope="session")
def numba() -> Operations:
    """The Numba backend."""
    if "numba" not in available_backends("cpu"):
        pytest.skip("needs Numba")
    return operations("numba", "cpu")


@pytest.fixture(scope="session")
def gradient() -> Callable[..., Tensor]:
    """A function that makes gradients: ``gradient(numel, seed, dtype)``."""

    def make(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = -(-numel // 256)
        # Magnitudes differ from super-group to super-group, and every third one has a mean worth subtracting.
        scale = torch.exp(1.5 * torch.randn(count, 1, generator=generator))
        mean = torch.where(torch.arange(count)[:, None] % 3 == 0, torch.randn(count, 1, generator=generator), 0.0)
        values = scale * (torch.randn(count, 256, generator=generator) + mean)
        return values.flatten()[:numel].to(dtype).contiguous()

    return make
