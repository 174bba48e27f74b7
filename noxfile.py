"""Every check of the repository, each in an environment of its own: ``python -m nox``.

A session installs the packages from this checkout, and only the layers that it is about: the tests of core run where
there is no Numba, no MPI and no other dynamiq package. Nothing but nox has to be there beforehand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

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
    "ddp": [*BELOW_DDP, "packages/dynamiq-ddp[cpu,mpi,plot,safetensors]"],
}
"""What each layer's tests may import: the layer itself and those below."""

FOREIGN = {
    "core": ["dynamiq_kernels", "dynamiq_transport", "dynamiq_ddp", "mpi4py", "numba", "triton"],
    "kernels": ["dynamiq_transport", "dynamiq_ddp", "mpi4py"],
    "transport": ["dynamiq_core", "dynamiq_kernels", "dynamiq_ddp", "numba", "triton"],
    "ddp": [],
}
"""What must be absent from the environment of each layer's tests."""

FRAMEWORKS = {
    "torch": [],
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "transformers": ["transformers", "accelerate"],
}
"""What is installed beside DynamiQ, to train with it there."""

TORCH_VERSIONS = {"minimum": ["torch==2.10.0", "numpy==1.26.4"], "newest": ["torch==2.14.1"]}
"""The oldest torch that the packages allow, with a NumPy of its time, and the newest to try them with.

CUDA builds come with a Triton of their own. That of torch 2.9 lacks what the kernels use.
"""

OF_TORCH = ("torch", "triton", "sympy", "numpy")
"""What a version of torch wants in versions of its own."""

SIDE_BY_SIDE = ("kernels",)
"""Layers whose tests run in several processes: they know no time-outs, and are long enough to gain by it."""

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

COMPILE = "from dynamiq_kernels import operations, warmup; warmup(operations())"
"""Compiled code is kept on disk: once for all processes, instead of in every one of them at the same time."""

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
    workers = ["-n", str(min(4, os.cpu_count() or 1))] if layer in SIDE_BY_SIDE else []
    runner = ["pytest-xdist"] if workers else []
    install(session, "pytest", "hypothesis", *runner, *runtime, packages=LAYERS[layer])
    session.run("python", "-c", ASSERT_ABSENT, *FOREIGN[layer], log=False)
    package = f"packages/dynamiq-{layer}"
    everything = [*workers, "--doctest-modules", f"{package}/src", f"{package}/tests"]
    if layer == "ddp":  # the blocks, figures and tutorial of the pages need all four packages
        everything.append("docs")
    environment = dict(RANKS)
    if layer == "kernels" and session.run("python", "-c", ASK_FOR_GPU, silent=True, log=False) != "True\n":
        environment["TRITON_INTERPRET"] = "1"  # without a GPU, Triton's kernels run in its interpreter
    if layer == "kernels":
        session.run("python", "-c", COMPILE, env=RANKS, log=False)
    session.run("pytest", *(session.posargs or everything), env=environment)


@nox.session
@nox.parametrize("framework", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def frameworks(session: nox.Session, framework: str) -> None:
    """Train with the hook inside a framework that people use; not part of the default run."""
    install(session, "pytest", *FRAMEWORKS[framework], packages=[*BELOW_DDP, "packages/dynamiq-ddp[cpu]"])
    session.run("pytest", "packages/dynamiq-ddp/tests-integration", "-k", framework, *session.posargs, env=RANKS)


@nox.session
def package(session: nox.Session) -> None:
    """Build the four distributions, check them, and use each from its wheel where nothing else is installed."""
    install(session, "build", "hatchling", "twine")
    dist = Path(session.create_tmp(), "dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    for layer in LAYERS:
        folder = f"packages/dynamiq-{layer}"
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), folder, silent=True)
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    integration = Path("packages/dynamiq-ddp/tests-integration").resolve()
    session.run("python", str(integration / "distributions.py"), str(dist))
    for layer in LAYERS:
        clean = dist.parent / layer
        session.run("python", "-m", "venv", "--clear", str(clean))
        python = str(clean / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
        (wheel,) = dist.glob(f"dynamiq_{layer}-*.whl")
        pip = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", "constraints.txt", "--find-links", str(dist)]
        session.run(*pip, str(wheel), external=True)
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        with session.chdir(dist.parent):
            session.run(python, str(integration / "smoke" / f"{layer}.py"), env={**RANKS, "PATH": path}, external=True)


@nox.session
@nox.parametrize("which", list(TORCH_VERSIONS), ids=list(TORCH_VERSIONS))
def torch_versions(session: nox.Session, which: str) -> None:
    """The tests of all layers with the oldest or the newest torch that is supported; not part of the default run."""
    # The pins of what belongs to a torch version make room for what that version asks for.
    pins = Path("constraints.txt").read_text().splitlines()
    loose = Path(session.create_tmp(), "constraints.txt").resolve()
    loose.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in OF_TORCH) + "\n")
    session.install("--no-compile", "-c", str(loose), "hatchling", "editables", *TORCH_VERSIONS[which])
    editable = [argument for package in LAYERS["ddp"] for argument in ("-e", package)]
    tools = ["pytest", "hypothesis", *MPI_RUNTIME]
    session.install("--no-compile", "-c", str(loose), "--no-build-isolation", *editable, *tools)
    for layer in LAYERS:
        session.run("pytest", f"packages/dynamiq-{layer}/tests", *session.posargs, env=RANKS)


@nox.session
def docs(session: nox.Session) -> None:
    """The site with every warning an error, the examples in its pages, and every link inside it."""
    tools = ["sphinx", "furo", "myst-parser", "latex2mathml", "pytest"]
    install(session, *tools, packages=[*BELOW_DDP, "packages/dynamiq-ddp"])
    for builder in ("html", "doctest"):
        session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", builder, "docs", f"docs/_build/{builder}")
    session.run("python", "docs/check_site.py", "docs/_build/html")
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
    session.run("python", "-c", COMPILE, log=False)
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
