"""benchmarks/network.py: what it decides, and with the rights of root also what it makes and that nothing remains."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "network.py"
_SPEC = importlib.util.spec_from_file_location("network", PROGRAM)
assert _SPEC is not None
assert _SPEC.loader is not None
network: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(network)

ME = (os.getpid(), network.start_of(os.getpid()))


def shell(*scripts: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["sh", "-c", script], start_new_session=True) for script in scripts]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_what_a_run_that_has_ended_left_behind_is_removed() -> None:
    (ended,) = shell("exit 0")
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has an entry in /proc
    mine = network.Names(*ME)
    reused = network.Names(ME[0], ME[1] - 1)
    gone = network.Names(ended.pid, 1)
    foreign = ["dynamiq", f"dynamiq-{ended.pid}-1-", f"xdynamiq-{ended.pid}-1-hub", "work", f"{gone.hub}-2"]
    names = [mine.hub, mine.rank(3), reused.rank(0), gone.hub, gone.rank(12), *foreign]
    assert network.leftovers(names) == [reused.rank(0), gone.hub, gone.rank(12)]
    ended.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0", "true"], "--ranks cannot be 0"),
        (["--ranks", "251", "true"], "--ranks cannot be 251"),
        (["--rate", "fast", "true"], "--rate cannot be 'fast'"),
        (["--timeout", "0", "true"], "--timeout cannot be 0"),
        ([], "command"),
    ],
)
def test_arguments_out_of_range(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        network.parse(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_keeps_its_own_options() -> None:
    options = network.parse(["--ranks", "3", "--", "python", "train.py", "--rate", "2", "--", "x"])
    assert options.command == ["python", "train.py", "--rate", "2", "--", "x"]
    assert (options.ranks, options.rate) == (3, "200mbit")


def test_without_the_tools_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(network.sys, "platform", "linux")
    assert network.main(["true"]) == 2
    assert capsys.readouterr().err == (
        "network.py: cannot make the network: ip and tc cannot be found; install iproute2\n"
    )


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (["exit 0", "exit 0"], 0),
        (["exec sleep 60", "exit 7"], 7),
        (["exec sleep 60", "kill -9 $$"], 137),
        (["trap '' TERM; sleep 60", "exec sleep 60"], 124),
    ],
)
def test_the_status_is_that_of_the_first_rank_that_fails(
    monkeypatch: pytest.MonkeyPatch, scripts: list[str], expected: int
) -> None:
    monkeypatch.setattr(network, "GRACE", 0.2)
    processes = shell(*scripts)
    with network.Signals() as signals:
        assert network.watch(processes, signals, 0.2 if expected == 124 else 30.0) == expected
        network.end(processes)
    assert None not in [process.poll() for process in processes]


def test_a_signal_is_noted_and_the_ranks_are_ended() -> None:
    processes = shell("exec sleep 60")
    before = signal.getsignal(signal.SIGTERM)
    with network.Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # does not interrupt the cleaning up after the first
        assert network.watch(processes, signals, 30.0) == 128 + signal.SIGTERM
        network.end(processes)
    assert processes[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------ with namespaces


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where the kernel, the tools or the rights are not there; asked with commands of its own."""
    name = f"probe-{uuid.uuid4().hex[:8]}"
    asked = [
        f"netns add {name}",
        f"-n {name} link add bridge type bridge",
        f"-n {name} link add near type veth peer name far",
    ]
    try:
        network.check_tools()
        for words in asked:
            network.run("ip", *words.split())
        network.run("tc", "-n", name, *network.limit("near", network.parse(["true"])).split())
    except network.NetworkError as error:
        pytest.skip(f"no rate-limited network can be made here: {error}")
    finally:
        if name in network.existing():
            network.run("ip", "netns", "delete", name)


@pytest.fixture
def start(namespaces: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(*arguments)``: the program as a process; in the end none of its namespaces may be there."""
    started: list[subprocess.Popen[str]] = []

    def launch(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAM), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.wait(30)
    left = [name for name in network.existing() for process in started if name.startswith(f"dynamiq-{process.pid}-")]
    network.remove(left)  # and what runs in them, which still holds the pipes
    for process in started:
        process.communicate(timeout=30)
    assert not left


def gone(pids: Iterable[int]) -> bool:
    """Whether these processes end, now or within a moment."""
    deadline = time.monotonic() + 5
    left = list(pids)
    while (left := [pid for pid in left if network.start_of(pid) is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


def test_every_rank_is_behind_an_interface_with_the_rate(start: Callable[..., subprocess.Popen[str]]) -> None:
    ask = 'echo "$(tc -j qdisc show)"; echo "$RANK/$WORLD_SIZE $MASTER_ADDR $(hostname -I)"; echo said >&2; cat'
    first = start("--ranks", "2", "--rate", "80mbit", "--", "sh", "-c", "head -c 1 /dev/zero; sleep 60")
    assert first.stdout is not None
    assert first.stdout.read(2) == "\0\0"  # another network, which lives at the same time and has the same addresses
    switch = f"dynamiq-{first.pid}-{network.start_of(first.pid)}-hub"
    ports = json.loads(network.run("tc", "-n", switch, "-j", "qdisc", "show"))
    run = start("--ranks", "3", "--rate", "80mbit", "--", "sh", "-c", f"{ask} </dev/null")
    out, err = run.communicate(timeout=30)
    assert run.returncode == 0, err
    assert err.split() == ["said"] * 3
    words = out.splitlines()
    assert sorted(line for line in words if "/" in line) == [f"{r}/3 10.0.0.1 10.0.0.{r + 1} " for r in range(3)]
    cables = [json.loads(line) for line in words if line.startswith("[")]
    buckets = [entry for cable in [*cables, ports] for entry in cable if entry["kind"] == "tbf"]
    assert sorted(entry["dev"] for entry in buckets) == ["eth0"] * 3 + ["port0", "port1"]
    assert [entry["options"]["rate"] for entry in buckets] == [10_000_000] * 5  # bytes per second
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM


def test_a_failing_rank_ends_the_others_and_what_they_started(start: Callable[..., subprocess.Popen[str]]) -> None:
    run = start("--", "sh", "-c", 'setsid sleep 60 & echo $!; [ "$RANK" = 1 ] && sleep 0.2 && exit 9; wait')
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (9, "network.py: rank 1 ended with status 9\n")
    assert len(out.split()) == 2
    assert gone(int(pid) for pid in out.split())


def test_a_killed_run_takes_its_ranks_along_and_the_next_one_clears_up(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    killed = start("--", "sh", "-c", "setsid sleep 60 & echo $! $$; wait")
    assert killed.stdout is not None
    pids = [[int(pid) for pid in killed.stdout.readline().split()] for _ in range(2)]
    killed.kill()
    killed.wait(30)
    assert gone(shell for _, shell in pids)  # at once; what they started, with the next run
    prefix = f"dynamiq-{killed.pid}-"
    assert sum(name.startswith(prefix) for name in network.existing()) == 3
    assert start("--ranks", "1", "--", "true").wait(30) == 0
    assert not [name for name in network.existing() if name.startswith(prefix)]
    assert gone(sleep for sleep, _ in pids)
