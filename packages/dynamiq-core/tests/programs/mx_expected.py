"""Writes ``tests/data/mx_expected.json``: blocks of float32 and what torchao makes of them in every MX format.

    python packages/dynamiq-core/tests/programs/mx_expected.py packages/dynamiq-core/tests/data/mx_expected.json

Needs torchao, which the tests do not. Scales below 2**-126 are left out: torchao divides by another one there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torchao
from torch import Tensor
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx

FORMATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m3": DTYPE_FP6_E2M3,
    "e3m2": DTYPE_FP6_E3M2,
    "e2m1": torch.float4_e2m1fn_x2,
}


def blocks() -> Tensor:
    """Zeros, a NaN, every power of two, ties, what saturates, and normal numbers of many magnitudes: [m, 32]."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.arange(32.0)
    normal = torch.randn(12, 32, generator=generator) * torch.exp2(torch.arange(-110.0, 110.0, 19.0))[:, None]
    rows = [
        torch.zeros(32),
        torch.where(ramp == 7, torch.nan, ramp),
        torch.exp2(-ramp),
        -torch.exp2(ramp),
        (ramp - 16) / 16,  # ties of three mantissa bits and less
        (ramp - 15.5) / 32,
        (ramp - 16) / 64 + 1.5,
        1.75 + ramp / 128,  # from the largest elements to what saturates
        -(2 - torch.exp2(-ramp)),
        torch.where(ramp < 16, 1.0, -0.0) * (1 + ramp / 1024),
        torch.exp(-ramp) * (1 - 2 * (ramp % 2)),
        *normal,
    ]
    return torch.stack(rows)


def cast(values: Tensor, dtype: torch.dtype | str) -> tuple[Tensor, Tensor]:
    """Codes uint8 [m, 32] and scales uint8 [m]."""
    scales, elements = to_mx(values, dtype, 32)
    codes = elements.view(torch.uint8)
    if codes.shape[1] == 16:  # two to a byte, the first one low
        codes = torch.stack((codes & 15, codes >> 4), dim=2).view(-1, 32)
    return codes, scales.view(torch.uint8).flatten()


def main() -> None:
    values = blocks()
    table: dict[str, object] = {"torchao": torchao.__version__, "torch": torch.__version__}
    table["values"] = [row.numpy().tobytes().hex() for row in values]
    for name, dtype in FORMATS.items():
        codes, scales = cast(values, dtype)
        table[name] = [f"{scale:02x} {bytes(row).hex()}" for scale, row in zip(scales, codes.tolist(), strict=True)]
    Path(sys.argv[1]).write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
