"""vNMSE of codecs on gradients of the demo's model, with everything that travels counted in the budget.

    python packages/dynamiq-ddp/benchmarks/gradient_error.py [--ranks 4 8] [--steps 5 40 80] [--bits 5] [--json]

MXFP8 is the yardstick: OCP Microscaling v1.0 blocks of 32 with an E8M0 scale and E4M3 elements as torch casts them,
8.25 bits per coordinate, decompressed, added and compressed again at every hop of the same ring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, vnmse
from dynamiq_ddp import simulate
from dynamiq_ddp.demo.capture import worker_gradients
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_kernels import operations

BLOCK = 32
MXFP8_BITS = 8 + 8 / BLOCK
LARGEST_EXPONENT = 8  # of E4M3


class Row(NamedTuple):
    """One measurement."""

    step: int
    ranks: int
    codec: str
    bits: float
    vnmse: float


def mxfp8(x: Tensor) -> Tensor:
    """Cast to MXFP8 (E4M3) and back; float32 [d], d a multiple of 32."""
    blocks = x.view(-1, BLOCK)
    _, exponent = torch.frexp(blocks.abs().amax(dim=1, keepdim=True))
    scale = torch.ldexp(torch.ones_like(blocks[:, :1]), exponent - 1 - LARGEST_EXPONENT)
    largest = torch.finfo(torch.float8_e4m3fn).max
    elements = (blocks / scale).nan_to_num(0.0).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return (elements.to(torch.float32) * scale).view(-1)


def mxfp8_ring(gradients: Tensor) -> Tensor:
    """The mean over the ranks [n, d] that a ring of MXFP8 hops arrives at."""
    n, d = gradients.shape
    padded = torch.nn.functional.pad(gradients, (0, -d % (BLOCK * n)))
    chunks = padded.view(n, n, -1)  # rank, chunk, coordinate
    total = torch.empty_like(chunks[0])
    for chunk in range(n):
        order = [(chunk + 1 + hop) % n for hop in range(n)]
        total[chunk] = mxfp8(chunks[order[0], chunk])
        for rank in order[1:]:
            total[chunk] = mxfp8(total[chunk] + chunks[rank, chunk])
    return total.flatten()[:d] / n


def configurations(bits: float) -> Iterator[tuple[str, CodecConfig]]:
    """The configurations to compare, by name."""
    yield "default", CodecConfig(bits=bits)
    yield "default, correlated", CodecConfig(bits=bits, rounding="correlated")
    yield "default, independent", CodecConfig(bits=bits, rounding="independent")
    yield "default, uniform levels", CodecConfig(bits=bits, bend=1.0)
    yield "default, no mean", CodecConfig(bits=bits, subtract_mean=False)
    yield "paper", CodecConfig.paper(bits=bits)
    yield "paper, independent", CodecConfig.paper(bits=bits, rounding="independent")


def measure(gradients: Tensor, *, step: int, bits: float) -> Iterator[Row]:
    """All rows for one set of gradients [n, d]."""
    n, d = gradients.shape
    exact = gradients.double().mean(dim=0)
    yield Row(step, n, "MXFP8", MXFP8_BITS, vnmse(mxfp8_ring(gradients), exact))
    fast = operations("auto", gradients.device)
    for name, config in configurations(bits):
        result = simulate(gradients, codec=DynamiQ(config, operations=fast), schedule="ring")
        # Each rank of a ring sends 2 (n - 1) / n of the coordinates.
        sent = max(result.bytes_sent) * 8 / (2 * (n - 1) / n * d)
        yield Row(step, n, name, float(sent), result.vnmse)


def main() -> None:
    """Measure, print a table, and with ``--json`` the rows as a last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 40, 80], help="training steps to measure at")
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    rows: list[Row] = []
    print(f"{'step':>5} {'ranks':>5}  {'codec':<24} {'bits':>6} {'vNMSE':>10} {'below MXFP8':>12}")
    captured = worker_gradients(max(options.ranks), recipe=Recipe())
    for step, gradients in enumerate(islice(captured, max(options.steps) + 1)):
        if step not in options.steps:
            continue
        for ranks in options.ranks:
            for row in measure(gradients[:ranks], step=step, bits=options.bits):
                if row.codec == "MXFP8":
                    yardstick = row.vnmse
                rows.append(row)
                factor = yardstick / row.vnmse
                print(f"{step:>5} {ranks:>5}  {row.codec:<24} {row.bits:>6.3f} {row.vnmse:>10.3e} {factor:>11.2f}x")
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
