"""Every check of the repository, each in an environment of its own: ``python -m nox``.

A session installs the packages from this checkout, and only the layers that it is about: the tests of core run where
there is no Numba, no MPI and no other dynamiq package. Nothing but nox has to be there beforehand.
"""

from __future__ import annotations

import argparse
import os
import sys

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "docs"]

BELOW_DDP = ["packages/dynamiq-core", "packages/dynamiq-kernels", "packages/dynamiq-transport"]
LAYERS = {
    "core": ["packages/dynamiq-core"],
    "kernels": ["packages/dynamiq-core", "packages/dynamiq-kernels[cpu,triton]"],
    "transport": ["packages/dynamiq-transport[mpi]"],
    "ddp": [*BELOW_DDP, "packages/dynamiq-ddp[cpu,mpi,plot]"],
}
"""What each layer's tests may import: the layer itself and those below."""

FOREIGN = {
    "core": ["dynamiq_kernels", "dynamiq_transport", "dynamiq_ddp", "mpi4py", "numba", "triton"],
    "kernels": ["dynamiq_transport", "dynamiq_ddp", "mpi4py"],
    "transport": ["dynamiq_core", "dynamiq_kernels", "dynamiq_ddp", "numba", "triton"],
    "ddp": [],
}
"""What must be absent from the environment of each layer's tests."""

SOURCES = [f"packages/dynamiq-{layer}/src" for layer in LAYERS]
MPI_RUNTIME = ["mpich; sys_platform != 'win32'"]
RANKS = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}
"""Ranks on one machine talk over the loopback interface and share its cores."""

ASSERT_ABSENT = """
import sys
from importlib.metadata import requires
from importlib.util import find_spec

brought_by_torch = " ".join(requires("torch") or ())  # its CUDA builds depend on triton
present = [name for name in sys.argv[1:] if name not in brought_by_torch and find_spec(name)]
sys.exit(f"installed, but belongs to another layer: {', '.join(present)}" if present else 0)
"""

ASK_FOR_GPU = "import torch; print(torch.cuda.is_available())"


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, and who imports whom. Posargs go to ``ruff check``, for instance ``--fix``."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    # The import graph is read from the files, so that nothing of the project has to be installed.
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy over the four packages."""
    install(session, "mypy", "pytest", "types-tqdm", packages=LAYERS["ddp"])
    session.run("mypy", *(session.posargs or SOURCES))


@nox.session
@nox.parametrize("layer", list(LAYERS), ids=list(LAYERS))
def tests(session: nox.Session, layer: str) -> None:
    """Tests and doctests of one layer, without the layers beside and above. Posargs replace pytest's arguments."""
    runtime = MPI_RUNTIME if any("mpi" in package for package in LAYERS[layer]) else []
    install(session, "pytest", "hypothesis", *runtime, packages=LAYERS[layer])
    session.run("python", "-c", ASSERT_ABSENT, *FOREIGN[layer], log=False)
    package = f"packages/dynamiq-{layer}"
    everything = ["--doctest-modules", f"{package}/src", f"{package}/tests"]
    if layer == "ddp":
        everything.append("docs")  # the blocks, the tutorial and the figures of the pages need all four packages
    environment = dict(RANKS)
    if layer == "kernels" and session.run("python", "-c", ASK_FOR_GPU, silent=True, log=False) != "True\n":
        environment["TRITON_INTERPRET"] = "1"  # without a GPU, Triton's kernels run in its interpreter
    session.run("pytest", *(session.posargs or everything), env=environment)


@nox.session
def docs(session: nox.Session) -> None:
    """The site with every warning an error, then the examples in its pages."""
    install(session, "sphinx", "furo", "myst-parser", packages=[*BELOW_DDP, "packages/dynamiq-ddp"])
    for builder in ("html", "doctest"):
        session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", builder, "docs", f"docs/_build/{builder}")
    session.log("docs/_build/html/index.html")


@nox.session
def soak(session: nox.Session) -> None:
    """Many all-reduces in a row: none wrong, no memory that grows, nothing left. Posargs: how many."""
    install(session, packages=[*BELOW_DDP, "packages/dynamiq-ddp[cpu]"])
    session.run("python", "packages/dynamiq-ddp/tests/soak.py", *(session.posargs or ["2000"]), env=RANKS)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a language model in four processes, plainly and compressed.

    ``nox -s demo -- --bits 4 --schedule butterfly --ranks 2 --steps 50``
    """
    parser = argparse.ArgumentParser(prog="nox -s demo --", add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4)
    options, rest = parser.parse_known_args(session.posargs)
    install(session, packages=[*BELOW_DDP, "packages/dynamiq-ddp[cpu,plot]"])
    # Compiled code is kept on disk: once for all ranks, instead of in every one of them at the same time.
    session.run("python", "-c", "from dynamiq_kernels import operations, warmup; warmup(operations())")
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    session.run("python", *launch, f"--nproc-per-node={options.ranks}", "-m", "dynamiq_ddp.demo", *rest, env=RANKS)


def install(session: nox.Session, *tools: str, packages: list[str] | tuple[str, ...] = ()) -> None:
    """Install tools and packages of this checkout, at the versions of constraints.txt."""
    pip = ["--no-compile", "-c", "constraints.txt"]  # to compile all of torch takes longer than to unpack it
    if packages:
        # With the build backend in the environment, pip makes no throw-away environment for each package.
        session.install(*pip, "hatchling", "editables", *tools)
        editable = [argument for package in packages for argument in ("-e", package)]
        session.install(*pip, "--no-build-isolation", *editable)
    else:
        session.install(*pip, *tools)
