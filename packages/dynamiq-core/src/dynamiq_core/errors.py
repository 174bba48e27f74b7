"""The exceptions that DynamiQ raises on purpose; every one of them is a `DynamiQError`."""

from __future__ import annotations


class DynamiQError(Exception):
    """Base class: catching it catches whatever the library raises deliberately."""


class ConfigError(DynamiQError, ValueError):
    """A configuration value that cannot work; the message names the value and what is allowed."""


class InputError(DynamiQError, ValueError):
    """A tensor or argument that an operation cannot take; nothing has been changed."""


class BackendError(DynamiQError, RuntimeError):
    """A backend was asked for that cannot run here; the message says why."""
