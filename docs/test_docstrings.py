"""Every public name says what it takes and what it raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import dynamiq_core
import dynamiq_core.baselines
import dynamiq_ddp
import dynamiq_kernels
import dynamiq_transport

PACKAGES = (dynamiq_core, dynamiq_core.baselines, dynamiq_kernels, dynamiq_transport, dynamiq_ddp)
ELSEWHERE = re.compile(r"\b(?:as (?:in|for)|see|as|made by) `", re.IGNORECASE)
"""How a docstring says that another one describes the arguments or the errors."""


def callables(package: ModuleType) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function, and the text that has to describe it, for each public function and method of a package."""
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value):
            text = own_docstring(value)
            made_by_users = not issubclass(value, Exception) and not getattr(value, "_is_protocol", False)
            written = getattr(vars(value).get("__init__"), "__code__", None)
            if made_by_users and written is not None and written.co_filename != "<string>":
                yield f"{name}()", vars(value)["__init__"], text
            for attribute, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not attribute.startswith("_"):
                    yield f"{name}.{attribute}", function, inspect.getdoc(getattr(value, attribute)) or text
        elif inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""


def own_docstring(value: type) -> str:
    return inspect.cleandoc(vars(value).get("__doc__") or "")


EVERY = [
    pytest.param(function, text, id=f"{package.__name__}.{name}")
    for package in PACKAGES
    for name, function, text in callables(package)
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_name_is_described(package: ModuleType) -> None:
    classes = [name for name in package.__all__ if inspect.isclass(getattr(package, name))]
    generated = [name for name in classes if own_docstring(getattr(package, name)).startswith(f"{name}(")]
    assert not generated  # what dataclasses and NamedTuples write by themselves
    assert not [name for name in classes if not own_docstring(getattr(package, name))]


@pytest.mark.parametrize(("function", "text"), EVERY)
def test_every_parameter_is_described(function: Callable[..., Any], text: str) -> None:
    assert text
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    silent = [name for name in parameters if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not silent or ELSEWHERE.search(text)


@pytest.mark.parametrize(("function", "text"), EVERY)
def test_errors_are_described(function: Callable[..., Any], text: str) -> None:
    """A function that raises by itself says so."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    assert not raised or "Raises:" in text or ELSEWHERE.search(text)


@pytest.mark.parametrize(("function", "text"), EVERY)
def test_no_description_reads_as_a_list(function: Callable[..., Any], text: str) -> None:
    """``n.`` alone would be drawn as an item of a numbered list."""
    assert not re.search(r"^\s*\w+: \w\.$", text, re.MULTILINE)
