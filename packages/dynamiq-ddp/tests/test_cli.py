"""What the command line prints."""

import json
import runpy
import sys
from importlib import metadata

import pytest
import torch

from dynamiq_ddp.cli import main
from dynamiq_kernels import operations


def test_the_report_names_the_backend_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["auto"]["cpu"] == operations("auto", "cpu").name
    assert report["backends"]["cpu"][0] == report["auto"]["cpu"]
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["transports"]["gloo"] is True


def test_the_report_reads_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  {'cpu':<18} {operations('auto', 'cpu').name}" in lines
    assert f"  {'gloo':<18} yes" in lines


def test_without_a_command_it_teaches_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "dynamiq_ddp.cli")
    monkeypatch.setattr(sys, "argv", ["dynamiq-ddp", "compare", "no-such-file.pt"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("dynamiq_ddp.cli", run_name="__main__")
    assert stopped.value.code == 2
    assert "no-such-file.pt cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sparse", "meta", "device"])
def test_what_cannot_be_compared_is_an_error_in_one_line(kind, tmp_path, capsys):
    rows = torch.ones(2, 300)
    torch.save({"sparse": rows.to_sparse(), "meta": rows.to("meta"), "device": rows}[kind], tmp_path / "rows.pt")
    device = "nowhere" if kind == "device" else "cpu"
    assert main(["compare", str(tmp_path / "rows.pt"), "--device", device]) == 2
    assert capsys.readouterr().err.startswith("error: ")
