"""``dynamiq-ddp compare`` as a user calls it."""

from __future__ import annotations

import builtins
import csv
import json

import pytest
import torch

from dynamiq_core import CodecConfig
from dynamiq_core.baselines import MXFP4
from dynamiq_ddp import simulate
from dynamiq_ddp.cli import main
from dynamiq_ddp.commands.codecs import make


@pytest.fixture
def file(random_rows, tmp_path):
    path = tmp_path / "gradients.pt"
    torch.save(random_rows(3, 20_000), path)
    return path


def test_json_csv_and_picture_say_the_same(file, random_rows, tmp_path, capsys):
    outputs = ["--json", "--out", str(tmp_path / "new" / "rows.csv"), "--plot", str(tmp_path / "new" / "plot.png")]
    chosen = ["--codecs", "mxfp4", "dynamiq:4", "thc:6", "--schedules", "ring", "butterfly", "--ranks", "2", "3"]
    assert main(["compare", str(file), *chosen, *outputs]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["coordinates"], printed["repeats"]) == (20_000, 2)
    rows = printed["rows"]
    keys = [(row["codec"], row["schedule"], row["ranks"]) for row in rows]
    assert keys == [
        (codec, schedule, ranks)
        for ranks in (2, 3)
        for codec in ("mxfp4", "dynamiq:4", "thc:6")
        for schedule in ("ring", "butterfly")
    ]
    assert rows[0]["vnmse"] == simulate(random_rows(3, 20_000)[:2], codec=MXFP4()).vnmse
    assert all(3.9 < row["bits"] <= 4 for row in rows if row["codec"] == "dynamiq:4")
    with (tmp_path / "new" / "rows.csv").open() as written:
        assert [{k: str(v) for k, v in row.items()} for row in rows] == list(csv.DictReader(written))
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000


def test_names_of_dynamiq():
    names = {
        "dynamiq": CodecConfig(),
        "dynamiq:3.5": CodecConfig(bits=3.5),
        "dynamiq-l2:4": CodecConfig(bits=4, tolerance=1.0),
        "paper": CodecConfig.paper(),
    }
    assert {name: make(name, torch.device("cpu")).config for name in names} == names


def test_the_table_names_factors_against_the_yardstick(file, capsys):
    assert main(["compare", str(file), "--codecs", "mxfp8", "bf16", "--no-time", "--limit", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5,000 coordinates, 2 repeats"
    assert lines == [line.rstrip() for line in lines]
    cells = {line.split()[0]: line.split() for line in lines[1:] if line.split()}
    factor = float(cells["mxfp8"][4]) / float(cells["bf16"][4])
    assert float(cells["bf16"][7]) == pytest.approx(factor, rel=2e-3)
    assert cells["mxfp8"][7] == "1.00"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codecs", "fp3"], "codec cannot be 'fp3'; allowed: bf16, mxfp8"),
        (["--codecs", "mxfp8:4"], "codec cannot be 'mxfp8:4'"),
        (["--codecs", "dynamiq:x"], "codec cannot be 'dynamiq:x'"),
        (["--codecs", "dynamiq:40"], "must be from 1 to 9, not 40"),
        (["--codecs", "thc:4.5"], "bits of thc must be an integer"),
        (["--ranks", "4"], "ranks cannot be 4; allowed: 2 to 3"),
        (["--schedules", "star"], "hierarchical:NODE_SIZE, hierarchical:NODE_SIZE:BETWEEN\n"),  # no function fits there
        (["--schedules", "ring", "auto"], "schedules cannot be 'auto', which measures a network"),
        (["--out", "rows.xlsx"], "allowed: a name that ends in .csv or .json"),
        (["--repeats", "0"], "repeats must be 1 or more"),
        (["--limit", "0"], "limit must be 1 or more"),
    ],
)
def test_errors_are_one_line(arguments, message, file, capsys):
    assert main(["compare", str(file), "--no-time", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_single_gradient_is_nothing_to_average(tmp_path, capsys):
    torch.save(torch.randn(1, 300), tmp_path / "one.pt")
    assert main(["compare", str(tmp_path / "one.pt")]) == 2
    assert "gradients cannot be those of a single rank; allowed: two or more" in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from(tmp_path):
    with pytest.raises(Exception, match=r"absent.pt cannot be read"):
        main(["compare", str(tmp_path / "absent.pt"), "--debug"])


def test_a_missing_matplotlib_is_named(file, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["compare", str(file), "--plot", "x.png"]) == 2
    assert 'pip install "dynamiq-ddp[plot]"' in capsys.readouterr().err
