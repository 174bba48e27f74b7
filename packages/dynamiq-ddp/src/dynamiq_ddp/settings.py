"""What the user of a state decides, checked once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from dynamiq_core import Codec, CodecConfig, ConfigError, DynamiQ
from dynamiq_kernels import Backend

from .route import ScheduleChoice, find_schedule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `DynamiQState` that belong to the run, and not to the process that it happens in.

    Raises:
        ConfigError: a value is out of range; the message names it and what is allowed.
    """

    config: CodecConfig
    backend: Backend
    codec: Codec[Any] | None
    schedule: ScheduleChoice
    min_compress_numel: int
    warmup_steps: int
    measure_every: int
    lanes: int | None
    timeout: float
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, CodecConfig):
            raise ConfigError(f"config cannot be {self.config!r}; allowed: a dynamiq_core.CodecConfig")
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise ConfigError(f"codec cannot be {self.codec!r}; allowed: a dynamiq_core.Codec")
        for name in ("min_compress_numel", "warmup_steps", "measure_every"):
            _check_count(name, getattr(self, name), 0)
        if self.lanes is not None:
            _check_count("lanes", self.lanes, 1)
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, (int, float))
            or not 0 < self.timeout < math.inf
        ):
            raise ConfigError(f"timeout cannot be {self.timeout!r}; allowed: a finite number of seconds above 0")
        if not isinstance(self.error_feedback, bool):
            raise ConfigError(f"error_feedback cannot be {self.error_feedback!r}; allowed: True or False")
        if self.error_feedback and self.codec is not None and type(self.codec).residual is Codec.residual:
            raise ConfigError(
                f"error_feedback cannot be True with {self.codec!r}, which cannot tell what its encodings lose; "
                "allowed: a codec with a method residual, such as dynamiq_core.DynamiQ"
            )
        find_schedule(self.schedule)

    @property
    def bits(self) -> float | None:
        """Budget per coordinate; None if a codec of another kind was given."""
        if self.codec is None:
            return self.config.bits
        return self.codec.config.bits if isinstance(self.codec, DynamiQ) else None

    def with_bits(self, bits: float) -> Settings:
        """The same with another budget.

        Raises:
            ConfigError: the budget is out of range, or a codec was given.
        """
        if self.codec is not None:
            raise ConfigError(f"bits cannot be set for a codec that was given: {self.codec!r}")
        return dataclasses.replace(self, config=self.config.replace(bits=bits))

    def summary(self) -> str:
        """Those that say when something happens, in words."""
        names = ("min_compress_numel", "warmup_steps", "measure_every", "error_feedback")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def portable(self) -> Settings:
        """The same for another process: the name of a backend in place of its kernels."""
        if not isinstance(self.codec, DynamiQ):
            return self
        backend: Any = self.codec.operations.name
        return dataclasses.replace(self, codec=None, config=self.codec.config, backend=backend)

    def fingerprint(self) -> str:
        """Of the codec, without making it."""
        return (DynamiQ(self.config) if self.codec is None else self.codec).fingerprint()


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} cannot be {value!r}; allowed: an integer of at least {least}")
