"""What gradient_error.py and ablation.py keep, and the tables that codec_tables.py and network_tables.py make."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.baselines import MXFP8
from dynamiq_ddp.comparison import compare
from dynamiq_kernels import operations

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(run_program: Callable[..., Any]) -> Callable[..., tuple[int, str, str]]:
    """``program("ablation.py", *words)``: exit status, output and errors."""
    return lambda name, *words: run_program([sys.executable, str(BENCHMARKS / name), *map(str, words)], timeout=300)


@pytest.fixture
def gradients(random_rows: Callable[..., torch.Tensor], tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A file, and what is in it."""
    rows = random_rows(4, 20_000)
    torch.save(rows, tmp_path / "small.pt")
    return tmp_path / "small.pt", rows


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", line.pop("date"))
        assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", line.pop("commit"))
    return lines


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal, but for the order in which several threads may have added."""
    for line, row in zip(found, expected, strict=True):
        assert line == pytest.approx(row)


def test_rows_of_codecs_are_kept(program: Callable[..., Any], gradients: tuple[Path, torch.Tensor]) -> None:
    path, rows = gradients
    out = path.with_suffix(".jsonl")
    words = ["--files", path, "--codecs", "mxfp8", "dynamiq", "--json", "--out", out]
    codecs = {"mxfp8": MXFP8(), "dynamiq": DynamiQ(CodecConfig(bits=5.0), operations=operations())}
    status, printed, err = program("gradient_error.py", "--ranks", 2, 4, "--no-time", *words)
    assert status == 0, err
    expected = [row._asdict() for n in (2, 4) for row in compare(rows[:n], codecs, timed=False)]
    whole = [{"gradients": "small", **row} for row in expected]
    close(json.loads(printed.splitlines()[-1]), whole)
    how = {"mxfp8": {"by": "torch"}, "dynamiq": {"by": codecs["dynamiq"].operations.name}}
    close(lines_of(out), [{**row, **how[row["codec"]], "limit": None, "repeats": 2} for row in whole])

    status, _, err = program("gradient_error.py", "--ranks", 4, "--repeats", 1, "--limit", 5000, *words)
    assert status == 0, err
    added = lines_of(out)[len(whole) :]
    assert [line["nanoseconds"] > 0 for line in added] == [True, True]
    origin = {"gradients": "small", "limit": 5000, "repeats": 1}
    close(
        [{**line, "nanoseconds": None} for line in added],
        [
            {**row._asdict(), **how[row.codec], **origin}
            for row in compare(rows[:, :5000], codecs, repeats=1, timed=False)
        ],
    )


def test_limit_out_of_range(program: Callable[..., Any]) -> None:
    status, _, err = program("gradient_error.py", "--limit", 0)
    assert status == 2
    assert err.endswith("error: --limit cannot be 0; allowed: 1 or more coordinates\n")


def test_rows_of_the_ablation_are_kept(program: Callable[..., Any], gradients: tuple[Path, torch.Tensor]) -> None:
    path, rows = gradients
    out = path.with_suffix(".jsonl")
    words = ["--ranks", 3, "--limit", 8192, "--repeats", 1, "--no-time", "--json", "--out", out]
    status, printed, err = program("ablation.py", path, *words)
    assert status == 0, err
    kept = lines_of(out)
    origin = {"gradients": "small", "budget": 5.0, "limit": 8192, "repeats": 1}
    assert kept == [{**row, **origin} for row in json.loads(printed.splitlines()[-1])]
    full, single, *_ = kept
    codecs = {
        name: DynamiQ(CodecConfig(bits=bits), operations=operations())
        for name, bits in (("full: DynamiQ's default", 5.0), ("at fewer bits", 4 + 14 * 8 / 256))
    }
    five, fewer = compare(rows[:3, :8192], codecs, repeats=1, timed=False)
    close([full], [{**five._asdict(), **origin, "factor": 1.0}])
    assert single["factor"] == pytest.approx(single["vnmse"] / fewer.vnmse)
    for line in kept[2:]:
        assert line["factor"] == pytest.approx(line["vnmse"] / five.vnmse), line["codec"]


def tables(program: Callable[..., Any], lines: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """What is made of some lines."""
    common = {
        "gradients": "g",
        "codec": "dynamiq",
        "schedule": "ring",
        "ranks": 8,
        "bits": 4.9999,
        "vnmse": 1e-3,
        "bias": None,
        "cosine": 0.99,
        "nanoseconds": None,
        "by": "numba",
        "limit": None,
        "repeats": 1,
        "date": "2026-01-01 00:00",
        "commit": "a",
    }
    (folder / "some.jsonl").write_text("".join(json.dumps(common | line) + "\n" for line in lines))
    status, _, err = program("codec_tables.py", folder / "some.jsonl", "--out", folder / "tables")
    assert status == 0, err
    return {path.name: path.read_text() for path in (folder / "tables").iterdir()}


def test_tables_of_codecs(program: Callable[..., Any], tmp_path: Path) -> None:
    timed = {"nanoseconds": 4.96, "limit": 100, "ranks": 4, "date": "2026-01-09 00:00", "commit": "t"}
    mxfp8 = {"codec": "mxfp8", "bits": 8.25, "bias": 1.5e-2, "by": "torch"}
    lines = [
        {**mxfp8, "ranks": 2, "vnmse": 4e-3},
        {**mxfp8, "vnmse": 1.5e-2, "date": "2026-01-03 00:00", "commit": "c"},
        {"ranks": 2, "vnmse": 5e-2, "date": "2026-01-02 00:00", "commit": "b"},
        {"vnmse": 5e-2, "date": "2026-01-08 00:00", "commit": "measured again"},
        {"vnmse": 1e-4, "bias": 2e-6},
        {"vnmse": 7e-5, "schedule": "direct"},
        {**mxfp8, **timed, "nanoseconds": 12.34},
        {**timed, "vnmse": 0.5},
        {"gradients": "other", "codec": "thc:8", "ranks": 4, "vnmse": 3e-3},
    ]
    assert tables(program, lines, tmp_path) == {
        "g-error.md": """\
| g | bits | n = 2 | n = 8 | bias, n = 8 | cosine, n = 8 |
| --- | --- | --- | --- | --- | --- |
| mxfp8 | 8.250 | 4.00e-03 (1.0x) | 1.50e-02 (1.0x) | 1.5e-02 | 0.99000 |
| dynamiq | 5.000 | 5.00e-02 (0.08x) | 1.00e-04 (150x) | 2.0e-06 | 0.99000 |

Measured on 2026-01-01, 2026-01-02 and 2026-01-03 at commits a, b and c.
""",
        "g-schedules.md": """\
| n = 8, g | ring | direct |
| --- | --- | --- |
| mxfp8 | 1.50e-02 |  |
| dynamiq | 1.00e-04 | 7.00e-05 |

Measured on 2026-01-01 and 2026-01-03 at commits a and c.
""",
        "g-time.md": """\
| codec | by | ns per coordinate, n = 4 |
| --- | --- | --- |
| mxfp8 | torch | 12.3 |
| dynamiq | numba | 5.0 |

Measured on 2026-01-09 at commit t.
""",
        "other-error.md": """\
| other | bits | n = 4 |
| --- | --- | --- |
| thc:8 | 5.000 | 3.00e-03 |

Measured on 2026-01-01 at commit a.
""",
    }


def test_tables_of_the_ablation(program: Callable[..., Any], tmp_path: Path) -> None:
    full, flat = {"codec": "full", "budget": 5.0, "factor": 1.0}, {"codec": "flat", "budget": 5.0, "factor": 1.6}
    timed = {"nanoseconds": 4.126, "limit": 100, "ranks": 4, "date": "2026-01-02 00:00", "commit": "t"}
    lines = [
        {**full, "ranks": 2, "vnmse": 1e-4},
        {**flat, "ranks": 2, "vnmse": 1.6e-4},
        full,
        {**full, **timed},
        {**full, "schedule": "direct", "vnmse": 1.0},
        {**full, "budget": 2.5, "bits": 2.5},
    ]
    assert tables(program, lines, tmp_path) == {
        "g-ablation-5-bits.md": """\
| change | bits | n = 2 | n = 8 | ns per coordinate, n = 4 |
| --- | --- | --- | --- | --- |
| full | 5.000 | 1.00e-04 (1.00) | 1.00e-03 (1.00) | 4.13 |
| flat | 5.000 | 1.60e-04 (1.60) |  |  |

Measured on 2026-01-01 and 2026-01-02 at commits a and t.
""",
        "g-ablation-2.5-bits.md": """\
| change | bits | n = 8 |
| --- | --- | --- |
| full | 2.500 | 1.00e-03 (1.00) |

Measured on 2026-01-01 at commit a.
""",
    }


def test_tables_of_the_network(program: Callable[..., Any], tmp_path: Path) -> None:
    step = {"step": 0.5, "alone": 0.1, "exposed": 0.42, "network": 0.4, "codec": 0.03}
    overlap = {"rate": "200mbit", "ranks": 2, "parameters": 9, "bits": 5.0, "bucket_mb": 4.0, "name": "ring, 2 lanes"}
    origin = {"date": "2026-01-01 00:00", "commit": "a"}
    timed = {"transport": "mpi", "ranks": 4, "chosen": ""}
    lines = [
        {**overlap, **step, "exposed": 9.9},
        {**overlap, **step},
        {**overlap, **step, "bits": 4.0, "codec": 0.84},
        {**timed, "name": "ring", "megabytes": 1, "quartiles": [1, 2, 3]},
        {**timed, "name": "auto", "megabytes": 25, "quartiles": [10, 20, 30], "chosen": "direct"},
    ]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line | origin) + "\n" for line in lines))
    status, _, err = program("network_tables.py", tmp_path / "some.jsonl", "--out", tmp_path / "tables")
    assert status == 0, err
    head = "| way | step | without communication | exposed | bytes / bandwidth | codec | ratio |\n"
    head += "| --- | --- | --- | --- | --- | --- | --- |\n"
    foot = "\nMeasured on 2026-01-01 at commit a.\n"
    assert {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()} == {
        "overlap-2-200mbit-4-5.md": f"{head}| ring, 2 lanes | 500 | 100 | 420 | 400 | 30 | 1.05 |\n{foot}",
        "overlap-2-200mbit-4-4.md": f"{head}| ring, 2 lanes | 500 | 100 | 420 | 400 | 840 | 0.50 |\n{foot}",
        "schedules-mpi-4.md": "| all-reduce | 1 MB | 25 MB |\n| --- | --- | --- |\n"
        f"| ring | 2.0 (1.0-3.0) |  |\n| auto |  | 20.0 (10.0-30.0) direct |\n{foot}",
    }


@pytest.mark.parametrize("name", ["codec_tables.py", "network_tables.py"])
def test_nothing_to_report(name: str, program: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    status, _, err = program(name, tmp_path / "none.jsonl", "--out", tmp_path)
    assert status == 2
    assert "there is nothing to report: no line belongs into a table" in err
