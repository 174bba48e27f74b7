"""What the sources of core may name: the standard library, torch without its distributed half, and core itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dynamiq_core

SOURCES = sorted(Path(dynamiq_core.__file__).parent.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a source names, with what it takes from there, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    yield from (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_standard_library_torch_and_core(source: Path) -> None:
    tree = ast.parse(source.read_text())
    for name in imported(tree):
        assert name.partition(".")[0] in {"torch", "dynamiq_core", *sys.stdlib_module_names}, name
    for name in (*imported(tree), *attributes(tree)):
        assert not name.startswith(("torch.distributed", "importlib")), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_nothing_reads_a_device_or_a_global_generator(source: Path) -> None:
    """A first line of defence; `test_host_reads` watches the operations themselves."""
    forbidden = {"tolist", "nonzero", "cpu", "numpy", "cuda", "manual_seed", "rand", "randn", "randint", "randperm"}
    # The constants of a row, made on the CPU once for each configuration, and the metric, which is a number.
    allowed = {"levels.py": {"item"}, "metrics.py": {"item"}}.get(source.name, set())
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in (forbidden | {"item"}) - allowed, ast.unparse(node)


def test_the_public_names_exist_and_say_what_they_are() -> None:
    for name in dynamiq_core.__all__:
        public = getattr(dynamiq_core, name)
        if callable(public):
            assert public.__doc__, name
