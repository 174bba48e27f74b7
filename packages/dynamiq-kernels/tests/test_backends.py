"""Which backend runs, what is said when one cannot, and what importing the package brings with it."""

from __future__ import annotations

import subprocess
import sys
from importlib import util

import pytest
import torch

from dynamiq_core import BackendError, DynamiQ, reference
from dynamiq_kernels import available_backends, backends, operations, warmup

IMPORT_BLOCKED = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
for name in sys.argv[1:]:
    sys.modules[name] = None
import dynamiq_kernels
from dynamiq_core import BackendError
assert "numba" not in sys.modules or sys.modules["numba"] is None
assert "triton" not in sys.modules or sys.modules["triton"] is None
print(dynamiq_kernels.operations("auto", "cpu").name, *dynamiq_kernels.available_backends("cpu"))
for backend in ("numba", "triton"):
    try:
        print(dynamiq_kernels.operations(backend, "cpu").name)
    except BackendError as error:
        print(error)
"""


def imported(*blocked: str) -> list[str]:
    """What a fresh process says in which some packages cannot be imported and no interpreter is asked for."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_BLOCKED, *blocked], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_without_numba_and_triton_the_reference_runs_and_says_so() -> None:
    auto, numba, triton = imported("numba", "llvmlite", "triton")
    assert auto == "reference reference"
    assert "numba is not installed" in numba
    assert "TRITON_INTERPRET=1" in triton


@pytest.mark.skipif(util.find_spec("numba") is None, reason="needs Numba")
def test_numba_runs_on_cpus_where_it_is_installed() -> None:
    auto, numba, _ = imported("triton")
    assert auto == "numba numba reference"
    assert numba == "numba"


def test_a_name_that_is_none_lists_those_that_are() -> None:
    with pytest.raises(BackendError, match=r"'auto', 'reference', 'numba', 'triton', not 'cuda'"):
        operations("cuda")  # type: ignore[arg-type]


def test_numba_is_for_cpus_only() -> None:
    with pytest.raises(BackendError, match=r"'numba' cannot run on 'cuda': it computes on CPUs only"):
        operations("numba", "cuda")
    assert "numba" not in available_backends("cuda")


def test_triton_runs_on_cpus_only_when_its_interpreter_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match=r"TRITON_INTERPRET=1"):
        operations("triton", "cpu")
    assert "triton" not in available_backends("cpu")
    if util.find_spec("triton") is not None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert "triton" in available_backends("cpu")
        assert available_backends("cpu")[0] != "triton", "auto never takes the interpreter"


def test_auto_takes_the_first_of_the_available_backends() -> None:
    for device in ("cpu", "meta"):
        assert operations("auto", device).name == available_backends(device)[0]
    assert operations("auto", "meta") is reference


def test_on_a_gpu_without_triton_auto_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_missing", lambda module, extra: f"{module} is not installed")
    assert operations("auto", "cuda").name == "reference"
    with pytest.raises(BackendError, match="triton is not installed"):
        operations("triton", "cuda")


def test_a_backend_that_is_installed_but_broken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_missing", lambda module, extra: None)
    monkeypatch.setitem(sys.modules, "dynamiq_kernels.numba", None)
    with pytest.raises(BackendError, match="'numba' cannot be imported"):
        operations("auto", "cpu")


def test_the_name_is_visible_in_the_codec() -> None:
    assert "operations=reference" in repr(DynamiQ(operations=operations("reference")))


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_warming_up_changes_no_generator(backend: str) -> None:
    if backend not in available_backends("cpu"):
        pytest.skip("needs Numba")
    before = torch.get_rng_state()
    warmup(operations(backend))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
