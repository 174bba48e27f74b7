from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dynamiq_core import BackendError, CodecConfig, ConfigError, DynamiQ, DynamiQError, InputError

ALL_WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8)


def test_defaults() -> None:
    config = CodecConfig()
    assert (config.bits, config.widths) == (5.0, (0, 2, 3, 4, 5, 6, 7, 8))
    assert (config.scales, config.rounding, config.subtract_mean, config.seed) == ("log", "dithered", True, 0)
    assert config.tolerance == 1 / 16


def test_the_published_preset_and_changes_to_it() -> None:
    config = CodecConfig.paper(bits=4.5, seed=3)
    assert (config.widths, config.scales, config.rounding) == ((2, 4, 8), "linear", "correlated")
    assert (config.bits, config.seed, config.tolerance) == (4.5, 3, 1.0)


@pytest.mark.parametrize(
    ("changes", "value", "allowed"),
    [
        ({"widths": (2, 9)}, "9", "0 to 8"),
        ({"widths": (-1, 4)}, "-1", "0 to 8"),
        ({"widths": ()}, "()", "non-empty"),
        ({"widths": [2, 4]}, "[2, 4]", "tuple"),
        ({"widths": (2.0, 4.0)}, "(2.0, 4.0)", "integers"),
        ({"widths": (True, 4)}, "(True, 4)", "integers"),
        ({"widths": (4, 2)}, "(4, 2)", "increase"),
        ({"widths": (2, 2, 4)}, "(2, 2, 4)", "increase"),
        ({"widths": (0,)}, "widths", "above 0"),
        ({"bits": 0.99}, "0.99", "1 to 9"),
        ({"bits": 9.01}, "9.01", "1 to 9"),
        ({"bits": 3.5, "widths": (4, 8)}, "3.5", "4.4375 to 9"),
        ({"bits": 4.5, "widths": (0, 2, 3)}, "4.5", "1 to 4"),
        ({"bits": float("nan")}, "nan", "1 to 9"),
        ({"bits": float("inf")}, "inf", "1 to 9"),
        ({"bits": 10**400}, "1000", "1 to 9"),
        ({"bits": "5"}, "'5'", "real number"),
        ({"bits": True}, "True", "real number"),
        ({"bits": None}, "None", "real number"),
        ({"scales": "fp8"}, "'fp8'", "'log', 'linear'"),
        ({"rounding": "nearest"}, "'nearest'", "'dithered', 'correlated', 'independent'"),
        ({"tolerance": -0.1}, "-0.1", "0 to 1"),
        ({"tolerance": 1.5}, "1.5", "0 to 1"),
        ({"tolerance": None}, "None", "real number"),
        ({"bend": 0.5}, "0.5", "1 to 4"),
        ({"bend": float("nan")}, "nan", "1 to 4"),
        ({"subtract_mean": 1}, "1", "True or False"),
        ({"seed": -1}, "-1", "2**64 - 1"),
        ({"seed": 2**64}, str(2**64), "2**64 - 1"),
        ({"seed": 1.0}, "1.0", "integer"),
        ({"seed": True}, "True", "integer"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(changes: dict[str, Any], value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CodecConfig(**changes)
    assert value in str(raised.value)
    assert allowed in str(raised.value)
    with pytest.raises(ConfigError):
        CodecConfig().replace(**changes)


@pytest.mark.parametrize("bits", [1, 1.0, 3.7, 5, 8.25, 9])
def test_every_real_budget_in_range_is_taken(bits: float) -> None:
    assert CodecConfig(bits=bits).bits == bits


@pytest.mark.parametrize("widths", [(8,), (1,), ALL_WIDTHS, (0, 8), (2, 4, 8)])
@pytest.mark.parametrize("scales", ["log", "linear"])
def test_both_ends_of_the_range_of_budgets_are_allowed(widths: tuple[int, ...], scales: Any) -> None:
    low, high = CodecConfig(widths=widths, scales=scales, bits=max(widths) + 1).bits_range()
    for bits in (low, high):
        CodecConfig(widths=widths, scales=scales, bits=bits)
    for bits in (low - 1e-6, high + 1e-6):
        with pytest.raises(ConfigError):
            CodecConfig(widths=widths, scales=scales, bits=bits)


def test_nothing_can_be_changed_in_place() -> None:
    config = CodecConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 4.0  # type: ignore[misc]
    assert config.replace(bits=4.0).bits == 4.0
    assert config.bits == 5.0


def test_equal_configurations_have_equal_fingerprints_and_others_have_not() -> None:
    """An integer budget on one rank and a float on another must not look like a disagreement."""
    base = DynamiQ(CodecConfig(bits=5, bend=2))
    assert CodecConfig(bits=5, bend=2) == CodecConfig(bits=5.0, bend=2.0)
    assert base.fingerprint() == DynamiQ(CodecConfig(bits=5.0, bend=2.0)).fingerprint()
    assert "\n" not in base.fingerprint()
    assert DynamiQ(CodecConfig(tolerance=-0.0)).fingerprint() == DynamiQ(CodecConfig(tolerance=0)).fingerprint()
    changes: list[dict[str, Any]] = [
        {"bits": 5.01}, {"widths": (0, 2, 4)}, {"scales": "linear"}, {"rounding": "independent"}, {"bend": 2.5},
        {"subtract_mean": False}, {"seed": 1}, {"tolerance": 0.5},
    ]  # fmt: skip
    assert {field for change in changes for field in change} == {f.name for f in dataclasses.fields(CodecConfig)}
    others = [DynamiQ(base.config.replace(**change)).fingerprint() for change in changes]
    assert len({base.fingerprint(), *others}) == len(others) + 1


def test_one_hierarchy_of_errors() -> None:
    for error, builtin in ((ConfigError, ValueError), (InputError, ValueError), (BackendError, RuntimeError)):
        assert issubclass(error, DynamiQError)
        assert issubclass(error, builtin)
