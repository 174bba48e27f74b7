"""``dynamiq-ddp bench`` on ranks that are threads, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from dynamiq_ddp import launched
from dynamiq_ddp.cli import main, parser
from dynamiq_ddp.commands import bench, output
from dynamiq_ddp.commands.bench import Advice, sentence
from dynamiq_transport import Link, LocalTransport, run_local


@pytest.fixture
def as_threads(monkeypatch):
    """``as_threads(size, words)``: what the command finds on each of so many ranks."""

    def launch(size: int, words: list[str]) -> list[output.Result | None]:
        here = threading.local()
        lanes = [LocalTransport.group(size) for _ in range(20)]

        @contextmanager
        def network(name, *, timeout):
            further = iter(lanes)

            def stock(tensor):
                tensor.mul_(size)

            rank = here.transport.rank
            yield launched.Network("local", here.transport, torch.device("cpu"), lambda: next(further)[rank], stock)

        monkeypatch.setattr(bench, "network", network)

        def run(transport):
            here.transport = transport
            return bench.run(parser().parse_args(words))

        return run_local(size, run)

    return launch


def test_rank_0_reports_every_combination(as_threads, tmp_path):
    out = tmp_path / "bench.csv"
    words = ["bench", "--sizes", "1000", "20000", "--codecs", "mxfp4", "dynamiq:4", "--schedules", "ring", "direct"]
    result, *others = as_threads(3, [*words, "--repeats", "1", "--out", str(out)])
    assert others == [None, None]
    report = json.loads(output.to_json(result.document))
    assert (report["ranks"], report["transport"]) == (3, "local")
    found = [(row["coordinates"], row["codec"], row["schedule"]) for row in report["rows"]]
    assert found == [
        (size, codec, schedule)
        for size in (1000, 20000)
        for codec in ("mxfp4", "dynamiq:4")
        for schedule in ("ring", "direct")
    ]
    for row in report["rows"]:
        assert row["speedup"] == pytest.approx(row["stock_seconds"] / row["seconds"])
    advice = report["advice"]
    assert [each["codec"] for each in advice] == ["mxfp4", "dynamiq:4"] * 2
    assert 4.25 < advice[2]["bits"] < 4.3
    assert advice[3]["bits"] <= 4
    for each in advice:
        fastest = min(
            (
                row
                for row in report["rows"]
                if (row["coordinates"], row["codec"]) == (each["coordinates"], each["codec"])
            ),
            key=lambda row: row["seconds"],
        )
        assert each["schedule"] == fastest["schedule"]
        saved = 2 * 2 / 3 * each["coordinates"] * (32 - each["bits"]) / 8
        assert each["break_even_bytes_per_second"] == pytest.approx(saved / each["codec_seconds"])
        assert min(each["lane_seconds"]) > 0
    for save in result.saves:
        save()
    assert len(out.read_text().splitlines()) == 1 + len(found)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_a_launchers_rank_0_prints_one_document(launcher, run_program):
    if launcher == "mpiexec" and (shutil.which("mpiexec") is None or importlib.util.find_spec("mpi4py") is None):
        pytest.skip("needs mpiexec and mpi4py")
    launch = {
        "torchrun": [*TORCHRUN, "--nproc-per-node=2"],
        "mpiexec": ["mpiexec", "-n", "2", sys.executable],
    }[launcher]
    words = ["bench", "--json", "--sizes", "1000", "--repeats", "1", "--codecs", "bf16", "--schedules", "ring"]
    status, out, err = run_program([*launch, "-m", "dynamiq_ddp", *words, "--transport", "gloo"], timeout=240)
    assert status == 0, err
    report = json.loads(out)
    assert (report["ranks"], report["transport"], len(report["rows"])) == (2, "gloo", 1)


def test_the_advice_compares_with_the_network_at_hand():
    advice = Advice(1000, "x", 5.0, 1e-3, 1e9, "ring", "direct", (2e-3, 1e-3))
    slow, fast = (sentence(advice, Link(0.0, 0.0, bandwidth)) for bandwidth in (0.5e9, 2e9))
    assert "pays below 8.00 Gbit/s, so it pays at 4.00." in slow
    assert "so it does not pay at 16.00." in fast
    assert "Lanes: 2 (2.00 ms with one, 1.00 ms with two)" in slow
    assert "Lanes" not in sentence(advice._replace(lane_seconds=None), Link(0.0, 0.0, 1.0))


@pytest.fixture
def no_launcher(monkeypatch):
    for name in (*launched.MPI_VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "this runs on several ranks; start it with torchrun"),
        (["--transport", "tcp"], "transport cannot be 'tcp'; allowed: gloo, nccl, mpi"),
        (["--schedules", "star"], "schedule cannot be 'star'"),
        (["--sizes", "0"], "sizes cannot be 0"),
        (["--repeats", "0"], "repeats cannot be 0"),
        (["--timeout", "nan"], "timeout cannot be nan; allowed: seconds above 0"),
        (["--out", "x.txt"], "allowed: a name that ends in .csv or .json"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert message in printed.err


@pytest.mark.usefixtures("no_launcher")
def test_a_single_rank_is_too_few_and_leaves_no_group(monkeypatch, capsys):
    """The way into a process group and out of it is the one of many ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["bench", "--transport", "gloo"]) == 2
    assert "an all-reduce needs 2 ranks or more" in capsys.readouterr().err
    assert not torch.distributed.is_initialized()
