"""The codec's parameters, checked once and never changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dynamiq_core.errors import ConfigError

SUPER_GROUP = 256
"""Coordinates that share a bit width and a two-byte scale (S in the formulas)."""

GROUP = 16
"""Coordinates that share a group scale (G in the formulas)."""

GROUPS = SUPER_GROUP // GROUP
"""Groups in a super-group."""

MAX_WIDTH = 8
"""Widest code, in bits."""

Scales = Literal["log", "linear"]
Rounding = Literal["dithered", "correlated", "independent"]


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """What every rank must agree on before it can read another rank's messages.

    Args:
        bits: budget per coordinate and direction of the all-reduce, in bits, everything included: codes, scales,
            statistics, headers. Any real number that the widths can use; see `bits_range`.
        widths: the bit widths that a super-group may get, 0 to 8. Width 0 sends nothing for a super-group but its mean.
            If it is among the widths, ``tolerance`` limits what it is used for.
        tolerance: the largest share of its energy that a super-group should lose, 0 to 1, where the budget allows it;
            see `dynamiq_core.allocation.floors`. Optimisers that scale each parameter's step by its own gradient, such
            as Adam, need super-groups of little energy as exact as the others. 0 asks for the widest width that fits
            for all. With 1 only the squared error of the whole counts, as in the paper, and super-groups of least
            energy may be dropped at every step, which is a bias. Without effect if 0 is not among the widths.
        scales: ``"log"``: 4-bit group scales in steps of a quarter octave, rounded up, so that entries never clip.
            ``"linear"``: 8-bit group scales, stochastically rounded, entries normalised by the true maximum.
        rounding: how the shared seed is used. ``"dithered"``: the receiver subtracts the sender's dither, which
            halves the variance of stochastic rounding at every hop and stays unbiased along a chain of hops.
            ``"correlated"``: the n roundings of a coordinate are stratified, so that their errors cancel in the sum.
            ``"independent"``: plain stochastic rounding.
        bend: ratio of the gap between the outer levels to the gap between the inner ones; 1 gives uniform levels.
        subtract_mean: whether the mean of a super-group over all workers is subtracted where it carries energy.
        seed: shared seed, 0 to 2**64 - 1.

    Raises:
        ConfigError: a value is outside what is allowed; the message names both.
    """

    bits: float = 5.0
    widths: tuple[int, ...] = (0, 2, 3, 4, 5, 6, 7, 8)
    tolerance: float = 1 / 16
    scales: Scales = "log"
    rounding: Rounding = "dithered"
    bend: float = 1.5
    subtract_mean: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_widths()
        _check_choice("scales", self.scales, get_args(Scales))
        _check_choice("rounding", self.rounding, get_args(Rounding))
        _check_real(f"bits with widths {self.widths}", self.bits, *self.bits_range())
        _check_real("tolerance", self.tolerance, 0.0, 1.0)
        _check_real("bend", self.bend, 1.0, 4.0)
        if not isinstance(self.subtract_mean, bool):
            raise ConfigError(f"subtract_mean must be True or False, not {self.subtract_mean!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}")
        object.__setattr__(self, "bits", float(self.bits))
        object.__setattr__(self, "tolerance", float(self.tolerance) + 0.0)  # -0.0 is 0.0, and looks like it
        object.__setattr__(self, "bend", float(self.bend))

    @classmethod
    def paper(cls, **changes: Any) -> CodecConfig:
        """The configuration nearest to the published one (arXiv 2602.08923): widths 2, 4, 8, linear scales, correlated.

        The widths are chosen by the squared error alone.

        Args:
            **changes: fields to set otherwise, for instance ``bits=4.5``.
        """
        preset: dict[str, Any] = {
            "widths": (2, 4, 8),
            "tolerance": 1.0,
            "scales": "linear",
            "rounding": "correlated",
        }
        return cls(**(preset | changes))

    def replace(self, **changes: Any) -> CodecConfig:
        """A copy with some fields changed, checked again.

        Args:
            **changes: fields to set otherwise.
        """
        return dataclasses.replace(self, **changes)

    def bits_range(self) -> tuple[float, float]:
        """Smallest and largest budget, in bits per coordinate, that these widths can use."""
        # One bit of headroom above the widest code: scales, statistics and headers of a small tensor.
        overhead = {"log": 10, "linear": 18}[self.scales] * 8 / SUPER_GROUP + 32 / SUPER_GROUP
        lowest = min(self.widths)
        return (1.0 if lowest == 0 else lowest + overhead), max(self.widths) + 1.0

    def _check_widths(self) -> None:
        widths = self.widths
        if not isinstance(widths, tuple) or not widths or any(type(w) is not int for w in widths):
            raise ConfigError(f"widths must be a non-empty tuple of integers, not {widths!r}")
        unknown = [w for w in widths if not 0 <= w <= MAX_WIDTH]
        if unknown:
            raise ConfigError(f"unknown width {unknown[0]}: widths are integers from 0 to {MAX_WIDTH}")
        if list(widths) != sorted(set(widths)):
            raise ConfigError(f"widths must increase without repetition, not {widths!r}")
        if max(widths) == 0:
            raise ConfigError("widths must contain a width above 0")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a real number, not {value!r}")
    if not low <= value <= high:  # NaN is in no range
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, not {value!r}")
