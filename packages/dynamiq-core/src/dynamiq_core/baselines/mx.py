"""Microscaling formats: blocks of 32 narrow floating-point elements that share a power of two.

Source: "OCP Microscaling Formats (MX) Specification", version 1.0, Open Compute Project, September 2023. Its formats
MXFP8, MXFP6 and MXFP4 are here as codecs of gradients: 8.25, 6.25 and 4.25 bits per coordinate.

What the specification prescribes: blocks of 32; an E8M0 scale, the largest power of two not above the block's largest
magnitude, divided by the largest power of two of the element format; elements rounded to nearest even and, beyond the
largest normal number, saturated; subnormal elements; a NaN scale makes the whole block NaN. Where it leaves freedom:

* A block with a NaN or an infinity gets the NaN scale, so that also element formats without such values hand it on.
* A largest magnitude too small for the scale gets the least one, 2**-127.
* Elements are packed as a little-endian bit stream, and the scales of a message follow its elements.

It says nothing of sums. Here every hop decodes, adds in float32, and casts again: the same block gets a new scale.

Shapes: d coordinates, m blocks of B = 32 coordinates in the chunk at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dynamiq_core.baselines.blocks import BlockPlan, block_plan, pack, unpack
from dynamiq_core.constants import constant
from dynamiq_core.errors import ConfigError
from dynamiq_core.protocol import Codec, Received

BLOCK = 32
"""Coordinates that share a scale."""

_BIAS, _MANTISSA, _NOT_FINITE = 127, 23, 255  # of float32, and of E8M0


class Element(NamedTuple):
    """A floating-point format of few bits: sign, exponent, mantissa.

    Attributes:
        exponent: bits of the exponent.
        mantissa: bits of the mantissa.
        largest: largest normal number.
        dtype: torch's type of this format, where there is one.
    """

    exponent: int
    mantissa: int
    largest: float
    dtype: torch.dtype | None = None

    @property
    def width(self) -> int:
        """Bits of an element."""
        return 1 + self.exponent + self.mantissa

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number, and of the subnormal ones."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def greatest(self) -> int:
        """Exponent of the largest normal number."""
        return int(self.largest).bit_length() - 1

    def encode(self, values: Tensor) -> Tensor:
        """Codes of float32 values of any shape, none of them beyond the largest: integers of `width` bits."""
        if self.dtype is not None:
            return values.to(self.dtype).view(torch.uint8)
        magnitude = values.abs()
        exponent = ((magnitude.view(torch.int32) >> _MANTISSA) - _BIAS).clamp(min=self.least)
        # In units of the last bit; what rounds up to the next power of two becomes its code by itself.
        units = torch.round(magnitude * _power_of_two(self.mantissa - exponent)).to(torch.int32)
        sign = torch.signbit(values).to(torch.int32) << (self.width - 1)
        return units + ((exponent - self.least) << self.mantissa) + sign

    def decode(self, codes: Tensor) -> Tensor:
        """The values of integer codes: float32 of the same shape."""
        if self.dtype is not None:
            return codes.to(torch.uint8).view(self.dtype).to(torch.float32)
        return constant(self.values(), torch.float32, codes.device)[codes]

    def values(self) -> list[float]:
        """Of all codes, for a format in which every code is a number.

        >>> ELEMENTS["e2m1"].values()[:8]
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        positive = []
        for code in range(2 ** (self.width - 1)):
            exponent, units = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
            if exponent:
                units += 1 << self.mantissa
            positive.append(units * 2.0 ** (max(exponent, 1) - 1 + self.least - self.mantissa))
        return positive + [-value for value in positive]


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        "e4m3": Element(4, 3, 448.0, torch.float8_e4m3fn),
        "e5m2": Element(5, 2, 57344.0, torch.float8_e5m2),
        "e2m3": Element(2, 3, 7.5),
        "e3m2": Element(3, 2, 28.0),
        "e2m1": Element(2, 1, 6.0),
    }
)
"""The specification's floating-point element formats."""


def cast(values: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Cast blocks of float32 to a microscaling format.

    Args:
        values: float32 [m, 32].
        element: format of the elements.

    Returns:
        Codes of the elements, integers [m, 32], and of the scales, uint8 [m].
    """
    exponent = values.abs().amax(dim=1).view(torch.int32) >> _MANTISSA
    finite = exponent < _NOT_FINITE
    scale = torch.where(finite, (exponent - element.greatest).clamp(min=0), 0)
    elements = values * _power_of_two(_BIAS - scale)[:, None]
    elements = torch.where(finite[:, None], elements.clamp(-element.largest, element.largest), 0.0)
    return element.encode(elements), torch.where(finite, scale, _NOT_FINITE).to(torch.uint8)


def uncast(codes: Tensor, scales: Tensor, element: Element) -> Tensor:
    """What `cast` has kept: float32 [m, 32], NaN where the scale is NaN."""
    exponent = scales.to(torch.int32)
    power = exponent << _MANTISSA
    power = torch.where(exponent == 0, 1 << (_MANTISSA - 1), power)  # 2**-127 is subnormal
    scale = torch.where(exponent == _NOT_FINITE, torch.nan, power.view(torch.float32))
    return element.decode(codes) * scale[:, None]


class Microscaling(Codec[BlockPlan]):
    """A microscaling format as a codec; deterministic, every hop casts the sum anew.

    Use one of `MXFP8`, `MXFP6` and `MXFP4`.

    Args:
        element: format of the elements, out of those of the class.

    Attributes:
        element: its name.

    Raises:
        ConfigError: there is no such format.
    """

    formats: tuple[str, ...] = ()

    def __init__(self, element: str) -> None:
        if element not in self.formats:
            allowed = ", ".join(map(repr, self.formats))
            raise ConfigError(f"element of {type(self).__name__} must be one of {allowed}, not {element!r}")
        self.element = element
        self._format = ELEMENTS[element]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.element!r})"

    def fingerprint(self) -> str:
        """The format."""
        return f"{type(self).__name__.lower()} {self.element}"

    def plan(
        self,
        statistics: Tensor | None,
        numel: int,
        *,
        device: torch.device,
        workers: int,
        chunks: int,
        step: int = 0,
        bucket: int = 0,
        gain: float | None = None,
    ) -> BlockPlan:
        """Ranges of whole blocks; arguments as in `Codec.plan`, most of them without influence.

        Raises:
            InputError: an argument is out of range.
        """
        block_bytes = BLOCK * self._format.width // 8 + 1
        return block_plan(numel, workers=workers, chunks=chunks, block=BLOCK, block_bytes=block_bytes)

    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: BlockPlan,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop, as in `Codec.decompress_accumulate_recompress`; all slots are alike."""
        total = plan.blocks(x, chunk)
        for message, _ in received:
            total += self._read(message)
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        codes, scales = cast(total, self._format)
        split = out.numel() - len(total)
        out[:split].copy_(pack(codes.flatten(), self._format.width))
        out[split:].copy_(scales)
        return out

    def decompress(self, message: Tensor, plan: BlockPlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """The chunk's coordinates of ``out`` [d] become the mean; see `Codec.decompress`."""
        plan.write(self._read(message) / plan.workers, out, chunk)
        return out

    def _read(self, message: Tensor) -> Tensor:
        width = self._format.width
        blocks = message.numel() // (BLOCK * width // 8 + 1)
        codes = unpack(message[: message.numel() - blocks], width).view(-1, BLOCK)
        return uncast(codes, message[message.numel() - blocks :], self._format)


class MXFP8(Microscaling):
    """MXFP8, 8.25 bits per coordinate, with elements ``"e4m3"`` or ``"e5m2"``; see `dynamiq_core.baselines.mx`.

    Example:
        >>> x = torch.linspace(-1, 1, 32)
        >>> codec = MXFP8()
        >>> plan = codec.plan(None, 32, device=x.device, workers=1, chunks=1)
        >>> message = codec.compress(x, plan, chunk=0, slot=0)
        >>> y = codec.decompress(message, plan, chunk=0, slot=0, out=torch.empty(32))
        >>> message.numel(), bool((y - x).abs().max() <= 2**-5)
        (33, True)
    """

    formats = ("e4m3", "e5m2")

    def __init__(self, element: Literal["e4m3", "e5m2"] = "e4m3") -> None:
        super().__init__(element)


class MXFP6(Microscaling):
    """MXFP6, 6.25 bits per coordinate, with elements ``"e2m3"`` or ``"e3m2"``; see `dynamiq_core.baselines.mx`."""

    formats = ("e2m3", "e3m2")

    def __init__(self, element: Literal["e2m3", "e3m2"] = "e2m3") -> None:
        super().__init__(element)


class MXFP4(Microscaling):
    """MXFP4, 4.25 bits per coordinate, with elements ``"e2m1"``; see `dynamiq_core.baselines.mx`."""

    formats = ("e2m1",)

    def __init__(self, element: Literal["e2m1"] = "e2m1") -> None:
        super().__init__(element)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for int32 from -126 to 127: float32."""
    return ((exponent + _BIAS) << _MANTISSA).view(torch.float32)
