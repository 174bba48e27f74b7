"""What lasts from bucket to bucket and from step to step: settings, lanes, the count of steps, and totals."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

from dynamiq_core import Codec, CodecConfig, ConfigError, DynamiQ, DynamiQError
from dynamiq_kernels import Backend
from dynamiq_transport import DEFAULT_TIMEOUT, ScheduleFunction, TorchTransport, Transport, TransportError

from .backend import make_codec
from .engine import DTYPES, Job, compare_ranks, describe, reduce_tensor
from .errors import CommunicationError
from .exact import Exact
from .lanes import Lane, Lanes, Pending, Work
from .meter import Meter
from .route import Route, find_function, find_route, quick_route
from .stats import Stats, collect

MIN_COMPRESS_NUMEL = 4096
"""Below this many coordinates, headers and padding take up what compression saves."""

LANES = {"cpu": 2, "cuda": 1}
"""One lane computes while another waits for the network; on CUDA streams see to that."""

_LOGGER = logging.getLogger("dynamiq_ddp")
_VERSION = 1


class DynamiQState:
    """State of `dynamiq_hook`: make one for each model, on every rank, with the same arguments.

    It can be made before ``init_process_group``. The groups for its messages are made in the first backward pass. That
    pass also compares the ranks' settings and the layout of their buckets, and so does every later one in which either
    has changed. After a backward pass that failed, every further one fails too, until `close` is called on all ranks.

    Args:
        bits: budget per coordinate and direction of the all-reduce, everything included.
        schedule: ``"ring"``, ``"butterfly"``, ``"direct"``, or a function ``(rank, size) -> Schedule``.
        backend: what carries out the codec's operations; ``"auto"`` takes the fastest that can run.
        codec: instead of ``bits``, ``backend`` and ``seed``: a codec that is made already.
        process_group: the ranks to average over, as given to DDP; the default group when None.
        min_compress_numel: smaller buckets are averaged without compression, as are those of float64 and complex
            numbers.
        warmup_steps: this many steps at the beginning are averaged without compression.
        lanes: buckets that may be in flight at the same time; when None, see `LANES`.
        timeout: seconds to wait for another rank.
        seed: of the random numbers, shared by all ranks.
        transport: instead of ``process_group``: called at first use, once for each lane, to make the lane's transport.

    Raises:
        ConfigError: an argument is out of range, or two exclude each other.
    """

    def __init__(
        self,
        *,
        bits: float = 5.0,
        schedule: str | ScheduleFunction = "ring",
        backend: Backend = "auto",
        codec: Codec[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        min_compress_numel: int = MIN_COMPRESS_NUMEL,
        warmup_steps: int = 0,
        lanes: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        seed: int = 0,
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        if codec is not None and (bits, backend, seed) != (5.0, "auto", 0):
            raise ConfigError("codec cannot be given together with bits, backend or seed, which describe another one")
        if codec is not None and not isinstance(codec, Codec):
            raise ConfigError(f"codec cannot be {codec!r}; allowed: a dynamiq_core.Codec")
        if transport is not None and process_group is not None:
            raise ConfigError("transport cannot be given together with process_group")
        if not timeout > 0:
            raise ConfigError(f"timeout cannot be {timeout!r}; allowed: seconds above 0")
        _check_count("min_compress_numel", min_compress_numel, 0)
        _check_count("warmup_steps", warmup_steps, 0)
        _check_count("lanes", 1 if lanes is None else lanes, 1)
        find_function(schedule)
        self._schedule = schedule
        self._min_compress_numel = min_compress_numel
        self._warmup_steps = warmup_steps
        self._number_of_lanes = lanes
        self._timeout = timeout
        self._config = CodecConfig(bits=bits, seed=seed)
        self._backend = backend
        self._given_codec = codec
        self._process_group = process_group
        self._transport = transport
        self._steps = 0
        self._exposed = 0.0
        self._past: list[Meter] = []  # of lanes that are closed
        self._forget()

    def _forget(self) -> None:
        """Everything that belongs to one set of lanes."""
        self._lanes: Lanes | None = None
        self._bound_to: object = None
        self._closer: Callable[[], object] = _nothing
        self._codec: Codec[Any] | None = self._given_codec
        self._compared: dict[int, Mapping[str, object]] = {}  # what all ranks have agreed on, by bucket
        self._pending: list[Pending] = []

    # ------------------------------------------------------------------ buckets

    def begin(self, tensor: Tensor, *, index: int) -> Future[Tensor]:
        """Start to average a bucket; what `dynamiq_hook` calls.

        Args:
            tensor: the bucket's gradients, written in place.
            index: of the bucket; the first of a step has index 0.
        """
        lanes = self._connect(tensor.device)
        if index == 0:
            self._steps += 1
            self._watch()
        if lanes is None or tensor.numel() == 0:
            return _completed(tensor)
        future, pending = lanes.begin(index, self._work(tensor, lanes, bucket=index), tensor.device)
        if pending is not None:
            self._pending.append(pending)
        return future

    def _work(self, tensor: Tensor, lanes: Lanes, *, bucket: int) -> Work:
        """What a lane does for a bucket. It holds no reference to the state, which may be gone before."""
        step = max(self._steps - 1, 0)
        try:
            codec, route = self._choose(tensor, lanes, step)
        except DynamiQError as error:
            return _report(error, tensor.device, step=step, bucket=bucket)
        facts = describe(tensor, codec, route, step=step, bucket=bucket)
        layout = {name: fact for name, fact in facts.items() if name != "step"}
        compared = self._compared.get(bucket) == layout
        self._compared[bucket] = layout

        def work(lane: Lane) -> Tensor:
            if not compared:
                compare_ranks(facts, lane.transport, tensor.device, lane.meter, step=step, bucket=bucket)
            job = Job(lane.transport, codec, route, step, bucket, lane.meter)
            if tensor.layout == torch.strided:
                return reduce_tensor(tensor, job)
            # A sparse gradient has other rows on every rank; the messages hold all of them.
            return reduce_tensor(tensor.to_dense(), job).to_sparse(tensor.sparse_dim())

        return work

    def _choose(self, tensor: Tensor, lanes: Lanes, step: int) -> tuple[Codec[Any], Route]:
        """How a bucket is averaged: a function of what is the same on all ranks."""
        large = tensor.numel() >= self._min_compress_numel
        compress = large and tensor.dtype in DTYPES and step >= self._warmup_steps
        route = find_route(self._schedule, lanes.rank, lanes.size) if large else quick_route(lanes.rank, lanes.size)
        if not compress:
            return Exact(tensor.dtype), route
        if self._codec is None:
            self._codec = make_codec(self._config, self._backend, tensor.device)
        return self._codec, route

    def _watch(self) -> None:
        """Have the end of this backward pass wait for the buckets, and raise what went wrong as it was raised.

        Without this an error would come out of DDP as a RuntimeError that only quotes it.
        """
        self._pending = [pending for pending in self._pending if not pending.done]
        with contextlib.suppress(RuntimeError):  # outside of a backward pass, as on a rank that DDP's join runs
            Variable._execution_engine.queue_callback(self._drain)

    def _drain(self) -> None:
        began = time.perf_counter()
        pending, self._pending = self._pending, []
        errors = [each.wait() for each in pending]
        self._exposed += time.perf_counter() - began
        for error in errors:
            if error is not None:
                raise error

    # ---------------------------------------------------------------- lifetimes

    def _connect(self, device: torch.device) -> Lanes | None:
        """The lanes over the ranks of the current process group; None when there is only one rank."""
        group = self._transport or self._process_group or _default_group()
        if self._lanes is not None and self._bound_to is group:
            return self._lanes
        if isinstance(group, dist.ProcessGroup) and group.size() == 1:
            return None
        self.close()  # a process group that is gone took its ranks along
        lanes = self._make_lanes(device)
        self._lanes, self._bound_to = lanes, group
        self._closer = weakref.finalize(self, lanes.close)
        _LOGGER.info("%s: rank %d of %d, %d lanes on %s", self, lanes.rank, lanes.size, len(lanes.lanes), device)
        return lanes

    def _make_lanes(self, device: torch.device) -> Lanes:
        number = self._number_of_lanes or LANES[device.type]
        transports: list[Transport] = []
        try:
            for _ in range(number):
                transports.append(self._make_transport())
                if len(transports) == 1:  # the others are made by all ranks or by none
                    facts = {"lanes": number, "timeout": self._timeout}
                    compare_ranks(facts, transports[0], device, Meter(), step=self._steps, bucket=0)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"no transport can be made: {error}") from error
        except TransportError as error:
            raise CommunicationError(str(error), error.peers, step=self._steps, bucket=0) from error
        return Lanes(transports)

    def _make_transport(self) -> Transport:
        if self._transport is not None:
            return self._transport()
        return TorchTransport.dedicated(self._process_group, timeout=self._timeout)

    def close(self) -> None:
        """Finish what was begun and leave the groups; the next use makes new ones. May be repeated."""
        if self._lanes is not None:
            self._past += (lane.meter for lane in self._lanes.lanes)
        self._closer()
        self._forget()

    # ------------------------------------------------------------ what it shows

    @property
    def steps(self) -> int:
        """Backward passes with communication so far."""
        return self._steps

    def stats(self) -> Stats:
        """Totals of this rank since the state was made."""
        current = [] if self._lanes is None else [lane.meter for lane in self._lanes.lanes]
        return collect(
            [*self._past, *current], steps=self._steps, seconds_exposed=self._exposed, backend=self._backend_name()
        )

    def _backend_name(self) -> str:
        if isinstance(self._codec, DynamiQ):
            return self._codec.operations.name
        return self._backend if self._codec is None else repr(self._codec)

    def __repr__(self) -> str:
        codec = self._codec if self._codec is not None else self._config
        return f"DynamiQState({codec}, schedule={self._schedule!r}, backend={self._backend_name()!r})"

    # --------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to continue with the same random numbers: plain numbers and text."""
        codec = self._given_codec or DynamiQ(self._config)
        return {"version": _VERSION, "steps": self._steps, "codec": codec.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another state stopped; on every rank.

        Settings stay those of this state; a warning says if the codec differs. The number of ranks may be another one:
        nothing else is carried over. A run continues bit for bit when also DDP's buckets are the same. DDP arranges
        them anew after the first backward pass, so make one before parameters, optimiser and state are loaded.

        Raises:
            ConfigError: the dictionary is not from `state_dict`, or from another version of it.
        """
        if state.get("version") != _VERSION or not isinstance(state.get("steps"), int):
            raise ConfigError(f"state cannot be {dict(state)!r}; allowed: what state_dict of version {_VERSION} gave")
        mine = self.state_dict()["codec"]
        if state.get("codec") != mine:
            warnings.warn(f"the state was saved with codec {state.get('codec')}, and goes on with {mine}", stacklevel=2)
        self._steps = state["steps"]

    def __getstate__(self) -> dict[str, Any]:
        """Settings and steps. Process groups and transports belong to the process, and kernels to the machine."""
        codec = self._given_codec
        dynamiq = codec if isinstance(codec, DynamiQ) else None
        return {
            "config": self._config if dynamiq is None else dynamiq.config,
            "backend": self._backend if dynamiq is None else dynamiq.operations.name,
            "codec": codec if dynamiq is None else None,
            "schedule": self._schedule,
            "min_compress_numel": self._min_compress_numel,
            "warmup_steps": self._warmup_steps,
            "lanes": self._number_of_lanes,
            "timeout": self._timeout,
            "steps": self._steps,
            "dropped": [name for name in ("process_group", "transport") if getattr(self, f"_{name}") is not None],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("codec", "schedule", "min_compress_numel", "warmup_steps", "lanes", "timeout")
        DynamiQState.__init__(self, **{name: state[name] for name in names})
        self._config, self._backend, self._steps = state["config"], state["backend"], state["steps"]
        for name in state["dropped"]:
            warnings.warn(
                f"{name} is not kept with a DynamiQState; it uses the default group from now on", stacklevel=2
            )


def _report(problem: DynamiQError, device: torch.device, *, step: int, bucket: int) -> Work:
    """Tell the other ranks, which would wait for this one, and then raise."""

    def work(lane: Lane) -> Tensor:
        compare_ranks({"problem": problem}, lane.transport, device, lane.meter, step=step, bucket=bucket)
        raise problem

    return work


def _completed(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(tensor)
    return future


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ConfigError("there is no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} cannot be {value!r}; allowed: an integer of at least {least}")


def _nothing() -> None:
    """Closes nothing."""
