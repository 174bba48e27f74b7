"""benchmarks/time_to_accuracy: what it puts together from its runs, and that it runs at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamiq_core import ConfigError

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "time_to_accuracy"


class Modules(NamedTuple):
    methods: Any
    report: Any
    training: Any


@pytest.fixture(scope="module")
def modules() -> Iterator[Modules]:
    """The program's modules, which import each other as those of a script do."""
    pytest.importorskip("matplotlib", reason="the report draws a picture")
    sys.path.insert(0, str(PROGRAM))
    before = set(sys.modules)
    try:
        import methods
        import report
        import training

        yield Modules(methods, report, training)
    finally:
        sys.path.remove(str(PROGRAM))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and PROGRAM in Path(sys.modules[name].__file__).parents:
                del sys.modules[name]


@pytest.fixture
def run(modules: Modules) -> Callable[..., Any]:
    """``run(method, losses, seconds, ...)``."""

    def make(method: str, losses: list[float], seconds: float, *, network: str | None = None, **fields: Any) -> Any:
        values = {
            "task": "gpt",
            "schedule": None,
            "ranks": 4,
            "steps": 20,
            "seed": 0,
            "validation_loss": losses[-1],
            "vnmse": 1e-3,
            "replicas_identical": True,
            "bits_per_coordinate": None,
            "codec_seconds": None,
            "bytes_per_step": 2e6,
            "date": "2026-01-01 00:00",
            "commit": "0",
        }
        # The first two steps are not the pace.
        pace = [9.0, 9.0, *[seconds] * (len(losses) - 2)]
        return modules.training.Run(
            **values | {"method": method, "losses": losses, "seconds": pace, "network": network} | fields
        )

    return make


def test_time_is_steps_to_the_target_at_the_pace_of_the_network(modules: Modules, run: Callable[..., Any]) -> None:
    falling = [5.0] * 5 + [1.0] * 15
    slower = [5.0] * 8 + [1.0] * 12
    never = [5.0] * 20
    runs = [run("fp32", falling, 0.1), run("dynamiq:5", slower, 0.1, schedule="ring"), run("mxfp4", never, 0.1)]
    for network, factor in (("100mbit", 2.0), ("1000mbit", 1.0)):
        runs += [
            run("fp32", falling[:5], 8 * factor, network=network),
            run("dynamiq:5", slower[:5], factor, network=network, schedule="ring"),
            run("mxfp4", never[:5], factor, network=network),
        ]
    results = modules.report.Results(runs)
    fp32, ours, bad = (
        modules.methods.Method(*each) for each in (("fp32", None), ("dynamiq:5", "ring"), ("mxfp4", None))
    )
    assert results.networks("gpt") == ["100mbit", "1000mbit"]
    target = 1.01 * modules.report.smooth(falling)[-1]
    steps = next(k for k, loss in enumerate(modules.report.smooth(falling), 1) if loss <= target)
    assert results.steps_to_target("gpt", fp32) == {0: steps}
    assert results.steps_to_target("gpt", ours) == {0: None}  # its smoothed loss ends a little higher
    assert modules.report.time_of(results, "gpt", fp32, "100mbit") == (16.0, 16.0 * steps)
    assert modules.report.time_of(results, "gpt", fp32, "1000mbit") == (8.0, 8.0 * steps)
    assert modules.report.time_of(results, "gpt", ours, "100mbit") == (2.0, None)
    assert modules.report.time_of(results, "gpt", bad, "1000mbit").target is None
    assert modules.report.time_of(results, "gpt", bad, "10mbit") is None


def test_tables_say_what_was_measured(modules: Modules, run: Callable[..., Any], tmp_path: Path) -> None:
    curve = [5.0, 4.0, 3.0] + [2.0] * 17
    runs = []
    for seed, gap in enumerate((0.0, 0.02)):
        runs += [
            run("fp32", curve, 0.1, seed=seed, validation_loss=2.0),
            run(
                "dynamiq:5",
                curve,
                0.1,
                schedule="ring",
                seed=seed,
                validation_loss=2.0 + gap,
                bits_per_coordinate=4.999,
            ),
        ]
    runs += [
        run("fp32", curve[:5], 4.0, network="200mbit"),
        run("dynamiq:5", curve[:5], 1.0, network="200mbit", schedule="ring"),
        run("dynamiq:5", curve, 1.1, network="200mbit", schedule="ring", date="2026-01-03 10:00", commit="c"),
        run("fp32", curve, 1.1, network="200mbit", date="2026-01-02 23:59", commit="b"),
        run("fp32", curve[:5], 1.1, date="2026-01-04 00:00", commit="used nowhere"),
    ]
    modules.report.write(runs, tmp_path)
    rows = {
        name: [[cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("gpt-loss.md", "gpt-time.md", "gpt-checked.md")
    }
    assert rows["gpt-loss.md"][3][:5] == [
        "dynamiq:5, ring",
        "5.00",
        "2",
        "2.0100 (2.0000 to 2.0200)",
        "+0.50 % (+0.00 % to +1.00 %)",
    ]
    reached = rows["gpt-time.md"][2][2].split()[0]
    fp32, ours = rows["gpt-time.md"][2:4]
    assert fp32[3:] == ["4000", f"{4 * float(reached):.1f}", "1.00"]
    assert ours[3:] == ["1000", f"{float(reached):.1f}", "4.00"]
    # 18 seconds at its pace and the two first steps, beside 20 steps of a second
    assert rows["gpt-checked.md"][2][1:5] == ["200mbit", f"{18 + 18 * 1.1:.1f}", "20.0", f"{(18 + 18 * 1.1) / 20:.2f}"]
    said = "Measured on 2026-01-01, 2026-01-02 and 2026-01-03 at commits 0, b and c.\n"
    assert (tmp_path / "measured.md").read_text() == said
    assert (tmp_path / "loss-against-time.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_nothing_is_an_error(modules: Modules, run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        modules.report.write([run("fp32", [2.0] * 20, 0.1)], tmp_path)


def test_one_commit_on_one_day(modules: Modules, run: Callable[..., Any]) -> None:
    results = modules.report.Results([run("fp32", [2.0] * 20, 0.1, seed=seed) for seed in range(2)])
    assert modules.report.measured(results) == "Measured on 2026-01-01 at commit 0.\n"


def test_a_result_is_of_its_plan_alone(modules: Modules, run: Callable[..., Any]) -> None:
    method = modules.methods.Method("dynamiq:5", "ring")
    plan = modules.training.Plan("gpt", method, 4, 20, 0, None, None)
    found = run("dynamiq:5", [2.0] * 20, 0.1, schedule="ring")
    assert plan.is_done(found)
    assert plan.is_done(found._replace(commit="another"))
    others = {"task": "minilm", "schedule": "butterfly", "ranks": 2, "steps": 30, "seed": 1, "network": "200mbit"}
    for name, value in others.items():
        assert not plan.is_done(found._replace(**{name: value})), name
    assert not plan._replace(only=5).is_done(found)


def test_a_single_step_has_no_pace(run_program: Callable[..., Any], tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAM), "train", "gpt", "--steps=1", f"--out={tmp_path / 'runs.jsonl'}"]
    status, _, err = run_program(words, env={"RANK": "0"}, timeout=120)
    assert (status, err) == (2, "error: --steps cannot be 1; allowed: 2 or more, of which the last is not counted\n")


@pytest.mark.parametrize(
    ("names", "words"),
    [(["bf8"], "bf8"), (["powersgd:0"], "powersgd:"), (["powersgd:x"], "powersgd:"), (["dynamiq:0"], "dynamiq:0")],
)
def test_methods_that_do_not_exist(modules: Modules, names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        modules.methods.methods(names, ["ring"])


def test_what_is_measured_is_not_measured_again(run_program: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    train = ["train", "gpt", "--steps=9", "--only=3", "--schedules=ring", f"--out={out}", "--methods"]
    for methods in (["fp32"], ["fp32", "dynamiq:5+", "powersgd:2", "bf16-hook"]):
        status, _, err = run_program([*launch, *train, *methods], timeout=300)
        assert status == 0, err[-3000:]
    plain, ours, *others = (json.loads(line) for line in out.read_text().splitlines())
    assert (plain["method"], ours["method"]) == ("fp32", "dynamiq:5+")
    assert len(plain["seconds"]) == len(ours["losses"]) == 3
    assert [run["losses"] == pytest.approx(plain["losses"], rel=0.01) for run in others] == [True, True]
    assert ours["losses"][0] == plain["losses"][0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.01)
    assert ours["bits_per_coordinate"] == pytest.approx(5.0, abs=0.01)
    assert plain["validation_loss"] is None  # cut short
