"""The command line as its users meet it: results, errors, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from dynamiq_core import DynamiQError
from dynamiq_ddp.cli import main, parser
from dynamiq_ddp.commands import doctor, output
from dynamiq_kernels import operations

MODULE = [sys.executable, "-m", "dynamiq_ddp"]


@pytest.fixture
def gradients(tmp_path):
    path = tmp_path / "rows.pt"
    torch.save(torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)), path)
    return str(path)


def subparsers() -> dict[str, argparse.ArgumentParser]:
    return parser()._subparsers._group_actions[0].choices


def test_the_report_names_the_backend_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["auto"]["cpu"] == operations("auto", "cpu").name
    assert report["backends"]["cpu"][0] == report["auto"]["cpu"]
    assert {*report["backends"]["cpu"], *report["obstacles"]["cpu"]} == {"reference", "numba", "triton"}
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["transports"]["gloo"] is True
    gpus = torch.cuda.device_count()
    assert len(report["devices"]) == 1 + gpus
    assert report["chosen"] == {
        "device": "cuda:0" if gpus else "cpu",
        "backend": report["auto"]["cuda:0" if gpus else "cpu"],
        "transport": "nccl" if gpus else "gloo",
        "schedule": "ring",
        "bits_per_coordinate": 5.0,
        "lanes": 1 if gpus else 2,
    }


def test_the_report_names_the_mpi_library(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py, which the extra mpi brings")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transports"]["mpi"] is True
    assert report["mpi"]["flavour"].lower().replace(" ", "") in report["mpi"]["library"].lower().replace(" ", "")


def test_a_broken_mpi_library_is_reported_and_ends_nothing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "version_of", lambda name: "1.0")
    monkeypatch.setattr(doctor, "ASK_MPI", "import os, sys; sys.stderr.write('cannot load MPI library'); os.abort()")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transports"]["mpi"] is False
    assert "cannot load MPI library" in report["mpi"]["problem"]


def test_a_backend_that_cannot_be_imported_is_reported(monkeypatch, capsys):
    def refuse(backend, device):
        if backend == "reference":
            return operations(backend, device)
        raise DynamiQError(f"backend {backend!r} cannot be imported: no such symbol")

    monkeypatch.setattr(doctor, "operations", refuse)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["cpu"] == ["reference"]
    assert report["obstacles"]["cpu"]["numba"] == "no such symbol"
    assert report["chosen"]["backend"] is None


def test_the_report_reads_as_text(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert main(["doctor"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"cpu {operations('auto', 'cpu').name}" in lines
    assert "gloo yes" in lines
    assert 'numba not installed; pip install "dynamiq-ddp[cpu]"' in lines
    assert "torch not installed" in lines


def test_every_command_teaches(capsys):
    commands = subparsers()
    assert list(commands) == ["doctor", "demo", "compare", "bench", "simulate", "completion"]
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    top = capsys.readouterr().out
    assert "exit status" in top
    for name, command in commands.items():
        assert f"dynamiq-ddp {name}" in command.description, "no example"
        assert "It prints " in command.description
        assert "exit status" in command.epilog
        for action in command._actions:
            assert action.help, f"{name} {action.dest} is not explained"


def test_without_a_command_it_teaches_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("module", [["dynamiq_ddp"], ["dynamiq_ddp.cli"], ["dynamiq_ddp.demo"]])
def test_runs_as_a_module(module, run_program):
    words = ["--help"] if module == ["dynamiq_ddp.demo"] else ["demo", "--help"]
    status, out, err = run_program([sys.executable, "-m", *module, *words], timeout=120)
    assert (status, err) == (0, "")
    assert out.startswith("usage: dynamiq-ddp demo ")


@pytest.mark.parametrize("kind", ["sparse", "meta", "device"])
def test_what_cannot_be_compared_is_an_error_in_one_line(kind, tmp_path, capsys):
    rows = torch.ones(2, 300)
    torch.save({"sparse": rows.to_sparse(), "meta": rows.to("meta"), "device": rows}[kind], tmp_path / "rows.pt")
    device = "nowhere" if kind == "device" else "cpu"
    assert main(["compare", str(tmp_path / "rows.pt"), "--device", device]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_what_nobody_foresaw_is_one_line_of_its_own_status(gradients, monkeypatch, capsys):
    def fail(*words, **more):
        raise RuntimeError("cannot allocate\n40 bytes")

    monkeypatch.setattr("dynamiq_ddp.commands.compare.load_gradients", fail)
    assert main(["compare", gradients]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "error: RuntimeError: cannot allocate 40 bytes (unexpected; --debug shows where it comes from)\n"
    )
    with pytest.raises(RuntimeError, match="cannot allocate"):
        main(["compare", gradients, "--debug"])


def test_an_error_says_which_rank_has_it(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "3")
    assert main(["bench", "--repeats", "0"]) == 2
    assert capsys.readouterr().err.startswith("error on rank 3: repeats cannot be 0")


def test_of_a_launchers_ranks_the_first_prints(gradients, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert main(["compare", gradients, "--no-time", "--codecs", "bf16", "--json"]) == 0
        assert bool(capsys.readouterr().out) == said


def test_a_rank_in_the_environment_of_a_shell_silences_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null():
    assert output.to_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}, "d": None}) == (
        '{"a": [null, 1.5], "b": {"c": null}, "d": null}'
    )


NOISE = """
import ctypes, os, sys
from dynamiq_ddp import cli
from dynamiq_ddp.commands import output
def run(options):
    print("a progress bar")
    os.write(1, b"a library in C\\n")
    if os.name == "posix":
        ctypes.CDLL(None).puts(b"held back by C")  # all of it, as standard output is a pipe
    return output.Result({"found": 1}, "text")
cli.doctor.run = run
sys.exit(cli.main(["doctor", "--json"]))
"""


def test_a_document_is_all_that_goes_to_standard_output(run_program):
    buffered = {"PYTHONUNBUFFERED": ""}  # set, it would keep C from holding anything back
    status, out, err = run_program([sys.executable, "-c", NOISE], env=buffered, timeout=120)
    assert (status, out) == (0, '{"found": 1}\n')
    assert "a progress bar" in err
    assert "a library in C" in err
    assert "held back by C" in err or os.name != "posix"


SAVES = """
import sys
from functools import partial
from pathlib import Path
from dynamiq_ddp import cli
from dynamiq_ddp.commands import output
def run(options):
    return output.Result({}, "text", [partial(Path(name).write_text, "saved") for name in sys.argv[1:]])
cli.doctor.run = run
sys.exit(cli.main(["doctor"]))
"""


def test_what_can_be_saved_is_saved(tmp_path, run_program):
    """A file that cannot be written costs neither the result nor another file."""
    names = [str(tmp_path / name) for name in ("first", "no/folder", "last")]
    status, out, err = run_program([sys.executable, "-c", SAVES, *names], timeout=120)
    assert (status, out, err) == (2, "text\n", f"error: {names[1]}: No such file or directory\n")
    assert [(tmp_path / name).read_text() for name in ("first", "last")] == ["saved", "saved"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")  # noqa: PTH110
def test_a_full_disk_behind_standard_output_costs_no_file(tmp_path):
    words = [sys.executable, "-c", SAVES, str(tmp_path / "saved")]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [Errno 28]")
    assert (tmp_path / "saved").read_text() == "saved"


@pytest.mark.parametrize(("to", "status", "error"), [("closed", 141, b""), ("full", 2, b"error: [Errno 28]")])
def test_output_that_nobody_takes(to, status, error):
    if to == "full" and not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("this system has no /dev/full")
    if to == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    try:
        done = subprocess.run([*MODULE, "doctor"], stdout=target, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(target)
    assert done.returncode == status
    assert done.stderr.startswith(error)
    assert done.stderr.count(b"\n") == (status == 2)


WAITS = """
import sys, threading
from dynamiq_ddp import cli
def run(options):
    print("waits", file=sys.stderr, flush=True)
    threading.Event().wait()
cli.doctor.run = run
sys.exit(cli.entry(["doctor"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_an_interrupt_ends_it_at_once_and_silently():
    waiting = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stderr.readline() == "waits\n"
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
    assert (out, err) == ("", "")
    assert waiting.returncode == -signal.SIGINT  # which a shell shows as 130
