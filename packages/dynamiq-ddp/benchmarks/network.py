"""Run a command as several ranks, each behind a network interface of its own with a limited rate.

    python packages/dynamiq-ddp/benchmarks/network.py --ranks 4 --rate 200mbit -- python train.py

Every rank gets a network namespace. Its only way out, eth0, leads to a bridge that stands for the switch; the bridge
lives in a namespace of its own, so nothing of the host's network is touched. Both ends of every cable are limited by a
token bucket: what a rank sends at its own end, what it receives at the switch's. So several ranks that send to one at
the same time share its rate, as they would on a real switch.

The command finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
NETWORK_RATE in its environment. When a rank fails, the others are ended. The exit status is that of the first rank that
failed, 128 plus the number of the signal that ended it or this program, 124 after --timeout, and 2 where the network
cannot be made.

Needs Linux, the programs ip and tc of iproute2, and the rights of root over the network.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "dynamiq"
NAMESPACES = Path("/run/netns")
MAX_RANKS = 250
GRACE = 5.0
"""Seconds between asking a rank to end and making it."""

_POLL = 0.02
_COMMAND_TIMEOUT = 30.0
_RATE = re.compile(r"\d+(\.\d+)?([kmgt]?i?(bit|bps))?", re.IGNORECASE)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class NetworkError(Exception):
    """The network cannot be made on this machine."""


class Names:
    """Names of the namespaces of one run: who made them, when it started, and what each is for.

    Args:
        pid: of the process that makes the network.
        start: when that process started, in the kernel's ticks since boot; a number is given to processes again.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.prefix = f"{PREFIX}-{pid}-{start}-"
        self.hub = f"{self.prefix}hub"

    def rank(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{self.prefix}{rank}"

    @classmethod
    def of_this_process(cls) -> Names:
        """Names that no other run uses."""
        start = start_of(os.getpid())
        assert start is not None
        return cls(os.getpid(), start)


def start_of(pid: int) -> int | None:
    """When a process started; None if there is none, or it has ended and only waits for its parent to notice."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def leftovers(names: Sequence[str]) -> list[str]:
    """Those namespaces among ``names`` whose run has ended without removing them."""
    found = [(name, re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-(hub|\d+)", name)) for name in names]
    return [name for name, parts in found if parts and start_of(int(parts[1])) != int(parts[2])]


def switch(names: Names, ranks: int) -> list[str]:
    """Commands for ``ip -n HUB -batch``: a bridge, and a cable from it to every rank."""
    lines = ["link add bridge type bridge", "link set bridge up"]
    for rank in range(ranks):
        lines += [
            f"link add port{rank} type veth peer name eth0 netns {names.rank(rank)}",
            f"link set port{rank} master bridge up",
        ]
    return lines


def interface(rank: int, options: argparse.Namespace) -> list[str]:
    """Commands for ``ip -n RANK -batch``: an address, and TCP's congestion control on the only route.

    The latter is the host's otherwise, so that one machine would measure another thing than the next.
    """
    return [
        "link set lo up",
        f"address add {address(rank)}/24 dev eth0",
        "link set eth0 up",
        f"route replace {address(-1)}/24 dev eth0 proto kernel scope link src {address(rank)} "
        f"congctl {options.congestion}",
    ]


def limit(device: str, options: argparse.Namespace) -> str:
    """A command for ``tc``: what leaves through the device is held to the rate."""
    bucket = f"rate {options.rate} burst {options.burst} latency {options.latency}"
    return f"qdisc add dev {device} root tbf {bucket}"


def address(rank: int) -> str:
    """Of a rank, in its own network."""
    return f"10.0.0.{rank + 1}"


def environment(rank: int, options: argparse.Namespace) -> dict[str, str]:
    """What a rank learns about its place."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(options.port),
        "GLOO_SOCKET_IFNAME": "eth0",
        "NETWORK_RATE": options.rate,
    }


def run(*command: str, lines: Sequence[str] = ()) -> str:
    """Run one of iproute2's programs and return what it prints.

    In a session of its own: a Ctrl-C is meant for this program, which still needs it to clean up.

    Raises:
        NetworkError: it fails.
    """
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NetworkError(f"`{' '.join(command)}` says: {said}")
    return done.stdout


def check_tools() -> None:
    """Say in one sentence what is missing.

    Raises:
        NetworkError: the system is not Linux, or a program is missing.
    """
    if sys.platform != "linux":
        raise NetworkError(f"network namespaces exist on Linux only, and this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} cannot be found; install iproute2")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces can be made by root only")


def make(names: Names, options: argparse.Namespace) -> None:
    """Make the switch, the ranks' namespaces, the cables between them, and their limits.

    Raises:
        NetworkError: something of it is not possible here.
    """
    everyone = [names.rank(rank) for rank in range(options.ranks)]
    run("ip", "-batch", "-", lines=[f"netns add {name}" for name in (names.hub, *everyone)])
    run("ip", "-n", names.hub, "-batch", "-", lines=switch(names, options.ranks))
    ports = [f"port{rank}" for rank in range(options.ranks)]
    run("tc", "-n", names.hub, "-batch", "-", lines=[limit(port, options) for port in ports])
    for rank, name in enumerate(everyone):
        run("ip", "-n", name, "-batch", "-", lines=interface(rank, options))
        run("tc", "-n", name, "-batch", "-", lines=[limit("eth0", options)])


def remove(names: Sequence[str]) -> None:
    """Kill whatever still runs in these namespaces, and remove them with all that is in them."""
    for name in names:
        with contextlib.suppress(NetworkError, ProcessLookupError):
            for pid in run("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            run("ip", "netns", "delete", name)
        except NetworkError as error:
            print(f"network.py: could not remove {name}: {error}", file=sys.stderr)


def existing() -> list[str]:
    """All named network namespaces of this machine."""
    return sorted(os.listdir(NAMESPACES)) if NAMESPACES.is_dir() else []


@contextlib.contextmanager
def network(options: argparse.Namespace) -> Iterator[Names]:
    """A network that exists inside the ``with`` block, after those that earlier runs have left behind are removed.

    Raises:
        NetworkError: it cannot be made.
    """
    check_tools()
    remove(leftovers(existing()))
    names = Names.of_this_process()
    try:
        make(names, options)
        yield names
    finally:
        remove([name for name in existing() if name.startswith(names.prefix)])


class Signals:
    """Notes signals instead of being interrupted by them, so that cleaning up is never cut short."""

    def __init__(self) -> None:
        self.caught: int | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in _ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.caught = self.caught or number


def launch(names: Names, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Start the command once for every rank."""
    # Bound here: to look something up between fork and exec is not safe.
    die_with_parent = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.ranks):
            command = ["ip", "netns", "exec", names.rank(rank), *options.command]
            env = {**os.environ, **environment(rank, options)}
            process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=die_with_parent)
            processes.append(process)
    except BaseException:
        end(processes)
        raise
    return processes


def watch(processes: Sequence[subprocess.Popen[bytes]], signals: Signals, timeout: float) -> int:
    """Wait until all ranks have succeeded, or one thing went wrong; the exit status."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                print(f"network.py: rank {rank} ended with status {status(code)}", file=sys.stderr)
                return status(code)
        if None not in codes:
            return 0
        if signals.caught is not None:
            return 128 + signals.caught
        if time.monotonic() > deadline:
            running = [str(rank) for rank, code in enumerate(codes) if code is None]
            print(f"network.py: rank {', '.join(running)} still runs after {timeout:g} s", file=sys.stderr)
            return 124
        time.sleep(_POLL)


def status(code: int) -> int:
    """An exit status as a shell would say it."""
    return 128 - code if code < 0 else code


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all ranks, first kindly. What they have started and left behind goes with their namespaces."""
    deadline = time.monotonic() + GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:  # so that its number still is its own
                os.killpg(process.pid, number)
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL)
    for process in processes:
        process.wait(GRACE)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; argparse explains and exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="200mbit", help="of every cable and direction, in the units of tc")
    parser.add_argument("--burst", default="128kb", help="what may pass at once at full speed")
    parser.add_argument("--latency", default="100ms", help="how long a packet may wait in a queue before it is dropped")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control")
    parser.add_argument("--port", type=int, default=29500, help="MASTER_PORT")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for the whole run")
    parser.add_argument("command", nargs="+", help="what every rank runs, after --")
    options = parser.parse_args(arguments)
    if not 1 <= options.ranks <= MAX_RANKS:
        parser.error(f"--ranks cannot be {options.ranks}; allowed: 1 to {MAX_RANKS}")
    if not _RATE.fullmatch(options.rate):
        parser.error(f"--rate cannot be {options.rate!r}; allowed: a number with a unit of tc, such as 200mbit")
    if not options.timeout > 0:
        parser.error(f"--timeout cannot be {options.timeout:g}; allowed: seconds above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on the network; the exit status."""
    options = parse(arguments)
    try:
        with Signals() as signals, network(options) as names:
            processes = launch(names, options)
            try:
                return watch(processes, signals, options.timeout)
            finally:
                end(processes)
    except NetworkError as error:
        print(f"network.py: cannot make the network: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
