"""Codecs as the command line names them: ``mxfp8``, or ``dynamiq:4`` with a number of bits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from dynamiq_core import Codec, CodecConfig, ConfigError
from dynamiq_core.baselines import BF16, MXFP4, MXFP6, MXFP8, THC, OmniReduce
from dynamiq_ddp.backend import make_codec

from .completion import complete

PRESETS: Mapping[str, CodecConfig] = MappingProxyType(
    {"dynamiq": CodecConfig(), "dynamiq-l2": CodecConfig(tolerance=1.0), "paper": CodecConfig.paper()}
)
"""DynamiQ with other parameters than bits."""

WITH_BITS: Mapping[str, float] = MappingProxyType(
    {**{name: config.bits for name, config in PRESETS.items()}, "thc": 8.0, "omnireduce": 5.0}
)
"""Codecs with a budget, and what it is if nothing else is said."""

FIXED: Mapping[str, Callable[[], Codec[Any]]] = MappingProxyType(
    {
        "bf16": BF16,
        "mxfp8": MXFP8,
        "mxfp8-e5m2": lambda: MXFP8("e5m2"),
        "mxfp6": MXFP6,
        "mxfp6-e3m2": lambda: MXFP6("e3m2"),
        "mxfp4": MXFP4,
    }
)

DEFAULT = (
    "bf16",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "thc:8",
    "thc:5",
    "omnireduce:8",
    "omnireduce:5",
    "paper",
    "dynamiq-l2",
    "dynamiq",
)


def make(name: str, device: torch.device) -> Codec[Any]:
    """The codec of a name.

    Raises:
        ConfigError: there is none, or its bits are out of range.
    """
    kind, colon, bits = name.partition(":")
    if kind in FIXED and not colon:
        return FIXED[kind]()
    if kind not in WITH_BITS or (colon and not _is_number(bits)):
        known = ", ".join((*FIXED, *(f"{name}:BITS" for name in WITH_BITS)))
        raise ConfigError(f"codec cannot be {name!r}; allowed: {known}")
    budget = float(bits) if colon else WITH_BITS[kind]
    if kind in PRESETS:
        return make_codec(PRESETS[kind].replace(bits=budget), "auto", device)
    if kind == "thc":
        if budget != int(budget):
            raise ConfigError(f"bits of thc must be an integer, not {bits}")
        return THC(int(budget))
    return OmniReduce(budget)


def make_all(names: Sequence[str], device: torch.device) -> dict[str, Codec[Any]]:
    """The codecs of some names, by name."""
    return {name: make(name, device) for name in names}


def add_argument(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """The option ``--codecs``."""
    known = ", ".join((*FIXED, *(f"{name}[:BITS]" for name in WITH_BITS)))
    action = parser.add_argument(
        "--codecs",
        nargs="+",
        metavar="CODEC",
        default=list(default),
        help=f"out of {known}; paper is DynamiQ with the published parameters, dynamiq-l2 with the least squared "
        f"error of the whole, for which gradients of little energy may be dropped (default: {' '.join(default)})",
    )
    complete(action, (*FIXED, *WITH_BITS))


def _is_number(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
