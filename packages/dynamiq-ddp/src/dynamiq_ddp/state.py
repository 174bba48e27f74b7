"""What lasts from bucket to bucket and from step to step: settings, lanes, the count of steps, and totals."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

from dynamiq_core import Codec, CodecConfig, ConfigError, DynamiQ, DynamiQError
from dynamiq_kernels import Backend
from dynamiq_transport import DEFAULT_TIMEOUT, Transport

from .backend import make_codec
from .bucket import Comparison, Way, averaging, reporting
from .connect import connect, default_group
from .engine import DTYPES, route_of
from .errors import first_cause
from .exact import Exact
from .exempt import Exempt, Exemption, Ranges
from .feedback import Feedback, Layout, Residuals
from .gate import Gate
from .lanes import Lane, Lanes, Pending, Work
from .nodes import own_part
from .route import NodeRoute, Route, ScheduleChoice, measures, quick_route
from .settings import Settings
from .stats import Stats, collect

MIN_COMPRESS_NUMEL = 4096
"""Below this many coordinates, headers and padding take up what compression saves."""

_LOGGER = logging.getLogger("dynamiq_ddp")
_VERSION = 1


class DynamiQState:
    """State of `dynamiq_hook`: make one for each model, on every rank, with the same arguments.

    It can be made before ``init_process_group``. The groups for its messages are made in the first backward pass. That
    pass also compares the ranks' settings and the layout of their buckets, and so does every later one in which either
    has changed. After a backward pass that failed, every further one fails too, until `close` is called on all ranks.

    Args:
        bits: budget per coordinate and direction of the all-reduce, everything included.
        config: instead of ``bits`` and ``seed``: all parameters of the codec.
        schedule: as for `all_reduce`. ``"auto"`` measures the network in the first backward pass.
        backend: what carries out the codec's operations; ``"auto"`` takes the fastest that can run.
        codec: instead of ``bits``, ``config``, ``backend`` and ``seed``: a codec that is made already.
        process_group: the ranks to average over, as given to DDP; the default group when None.
        min_compress_numel: smaller buckets are averaged without compression, as are those of float64 and complex
            numbers.
        warmup_steps: this many steps at the beginning are averaged without compression.
        measure_every: in every so many steps the exact mean is computed as well, and `stats` tells how far the
            compressed one was from it; never when 0. A measured step sends everything a second time, uncompressed.
        lanes: buckets that may be in flight at the same time; 2 on CPU and 1 on CUDA when None.
        timeout: seconds to wait for another rank.
        seed: of the random numbers, shared by all ranks.
        error_feedback: whether every rank adds what its messages of a bucket lost to that bucket's next gradient, so
            that errors do not pile up over the steps. Keeps 4 bytes for each coordinate that is compressed; see
            `loss_scale` and `reset_residuals`.
        exempt: parameters whose gradients are averaged without compression, in whatever buckets they are: a list, for
            instance ``[p for name, p in model.named_parameters() if "norm" in name]``, or a function that says so of
            a parameter, for instance ``lambda p: p.dim() <= 1``, which is asked once for each.
        transport: instead of ``process_group``: called at first use, once for each lane, to make the lane's transport.

    Raises:
        ConfigError: an argument is out of range, or two exclude each other.
    """

    def __init__(
        self,
        *,
        bits: float = 5.0,
        config: CodecConfig | None = None,
        schedule: ScheduleChoice = "ring",
        backend: Backend = "auto",
        codec: Codec[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        min_compress_numel: int = MIN_COMPRESS_NUMEL,
        warmup_steps: int = 0,
        measure_every: int = 0,
        lanes: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        seed: int = 0,
        error_feedback: bool = False,
        exempt: Exempt | None = None,
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        if codec is not None and (config is not None or (bits, backend, seed) != (5.0, "auto", 0)):
            raise ConfigError(
                "codec cannot be given together with bits, config, backend or seed, which describe another one"
            )
        if config is not None and (bits, seed) != (5.0, 0):
            raise ConfigError("config cannot be given together with bits or seed, which are in it")
        if transport is not None and process_group is not None:
            raise ConfigError("transport cannot be given together with process_group")
        self._settings = Settings(
            config=CodecConfig(bits=bits, seed=seed) if config is None else config,
            backend=backend,
            codec=codec,
            schedule=schedule,
            min_compress_numel=min_compress_numel,
            warmup_steps=warmup_steps,
            measure_every=measure_every,
            lanes=lanes,
            timeout=timeout,
            error_feedback=error_feedback,
        )
        self._exemption = Exemption(exempt)
        self._start(process_group, transport, steps=0)

    def _start(
        self, process_group: dist.ProcessGroup | None, transport: Callable[[], Transport] | None, *, steps: int
    ) -> None:
        self._process_group = process_group
        self._transport = transport
        self._steps = steps
        self._exposed = self._hidden = 0.0
        self._past: list[Lane] = []  # closed, but they count
        self._residuals = Residuals()
        self._forget()

    def _forget(self) -> None:
        """Everything that belongs to one set of lanes."""
        self._lanes: Lanes | None = None
        self._bound_to: object = None
        self._closer: Callable[[], object] = _nothing
        self._codec: Codec[Any] | None = None
        self._compared: dict[int, Mapping[str, object]] = {}  # what all ranks have agreed on, by bucket
        self._pending: list[Pending] = []
        self._changes = 0  # of settings, counted so that one that is made on one rank alone is seen by all
        self._gate: Gate | None = None  # of this step, once it has begun
        self._hold()

    def _hold(self) -> None:
        """Settings hold for a whole step."""
        self._held = (self._settings, self._exemption, self._changes)

    # ------------------------------------------------------------------ buckets

    def begin(self, tensor: Tensor, *, index: int, parameters: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Start to average a bucket; what `dynamiq_hook` calls.

        Args:
            tensor: the bucket's gradients, written in place.
            index: of the bucket; the first of a step has index 0.
            parameters: whose gradients they are, in order. What is kept for a bucket is kept for these.
        """
        lanes = self._connect(tensor.device)
        if index == 0:
            self._steps += 1
            self._gate = None
            self._take_over_changes()
            self._watch()
        if lanes is None or tensor.numel() == 0:
            return _completed(tensor)
        future, pending = lanes.begin(index, self._work(tensor, lanes, parameters, bucket=index), tensor)
        if pending is not None:
            if index > 0 and not self._pending:
                # A backward pass inside this one, as reentrant checkpoints make, has ended and waited for its buckets.
                self._watch()
            self._pending.append(pending)
        return future

    def _work(self, tensor: Tensor, lanes: Lanes, parameters: Sequence[Tensor], *, bucket: int) -> Work:
        """What a lane does for a bucket. It holds no reference to the state, which may be gone before."""
        step = max(self._steps - 1, 0)
        known = self._compared.get(bucket)
        first, gate = self._gate is None, self._gate or Gate(lanes)
        self._gate = gate
        try:
            way = self._choose(tensor, lanes, parameters, step, bucket)
        except DynamiQError as error:
            # Alone with a comparison, this rank would wait for the timeout. The others compare a later bucket if the
            # settings have changed, of which all have heard in the first one; if not, they see that this rank leaves.
            changed = known is not None and known["settings"] != self._held_in_words()
            comparison = _comparison(known, tensor, changed=changed, first=first)
            return reporting(
                error, tensor.device, step=step, bucket=bucket, comparison=comparison, gate=gate, first=first
            )
        layout = {name: fact for name, fact in way.facts(tensor, step=step, bucket=bucket).items() if name != "step"}
        self._compared[bucket] = layout
        comparison = _comparison(known, tensor, changed=known != layout, first=first)
        return averaging(tensor, way, step=step, bucket=bucket, comparison=comparison, gate=gate, first=first)

    def _choose(self, tensor: Tensor, lanes: Lanes, parameters: Sequence[Tensor], step: int, bucket: int) -> Way:
        """How a bucket is averaged: a function of what is the same on all ranks."""
        settings, exemption, _ = self._held
        ranges = exemption.ranges(tensor.numel(), parameters)
        codec: Codec[Any] = Exact(tensor.dtype)
        compressible = tensor.dtype in DTYPES and step >= settings.warmup_steps
        if compressible and ranges.compressed >= max(settings.min_compress_numel, 1):
            if self._codec is None:
                self._codec = settings.codec or make_codec(settings.config, settings.backend, tensor.device)
            codec = self._codec
        else:
            ranges = Ranges((tensor.numel(),), (False,))
        exact = isinstance(codec, Exact)

        def route(codec: Codec[Any], numel: int) -> Route | NodeRoute:
            if numel < settings.min_compress_numel:
                return quick_route(lanes.rank, lanes.size)
            return route_of(settings.schedule, lanes.lanes[0].transport, codec, numel, tensor.device)

        chosen, every, others = route(codec, ranges.compressed), settings.measure_every, exemption.others(parameters)
        return Way(
            codec=codec,
            route=chosen,
            ranges=ranges,
            exempt_route=route(Exact(tensor.dtype), tensor.numel() - ranges.compressed) if ranges.some else None,
            measured=every > 0 and step % every == 0 and not exact,
            feedback=None if exact else self._feedback(tensor, chosen, lanes, others, bucket=bucket),
            settings=self._held_in_words(),
        )

    def _held_in_words(self) -> str:
        settings, _, changes = self._held
        return f"{settings.summary()}, changed {changes} times"

    def _feedback(
        self, tensor: Tensor, route: Route | NodeRoute, lanes: Lanes, parameters: Sequence[Tensor], *, bucket: int
    ) -> Feedback | None:
        if not self._settings.error_feedback:  # which never changes
            return None
        numel = sum(parameter.numel() for parameter in parameters) or tensor.numel()
        shapes = tuple(tuple(parameter.shape) for parameter in parameters) or ((numel,),)
        part, _ = own_part(torch.empty(numel, device="meta"), route)
        layout = Layout(str(tensor.dtype), shapes, (int(part.storage_offset()), part.numel()))
        return self._residuals.feedback(bucket, layout, parameters, rank=lanes.rank, size=lanes.size)

    def _take_over_changes(self) -> None:
        settings, exemption, _ = self._held
        if settings is not self._settings:
            self._codec = None
        if unseen := exemption.unseen():
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unseen[:4])
            warnings.warn(
                f"{len(unseen)} exempt parameters, of shapes {shapes}, were in no bucket; are they of this model?",
                stacklevel=2,
            )
        self._hold()

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
        self._hidden += sum(max(0.0, min(each.ended, began) - each.began) for each in pending)
        if met := [error for error in errors if error is not None]:
            raise first_cause(met)

    # ---------------------------------------------------------------- lifetimes

    def _connect(self, device: torch.device) -> Lanes | None:
        """The lanes over the ranks of the current process group; None when there is only one rank."""
        ranks = self._transport or self._process_group or default_group()
        if self._lanes is not None and self._bound_to is ranks:
            return self._lanes
        if isinstance(ranks, dist.ProcessGroup) and ranks.size() == 1:
            return None
        self.close()  # a process group that is gone took its ranks along
        settings = self._settings
        measured = measures(settings.schedule)
        lanes = connect(
            ranks,
            number=settings.lanes,
            timeout=settings.timeout,
            device=device,
            step=self._steps,
            measured=measured,
        )
        self._lanes, self._bound_to = lanes, ranks
        self._closer = weakref.finalize(self, lanes.close)
        _LOGGER.info("%r: rank %d of %d, %d lanes on %s", self, lanes.rank, lanes.size, len(lanes.lanes), device)
        return lanes

    def close(self) -> None:
        """Finish what was begun and leave the groups; the next use makes new ones. May be repeated."""
        closer, lanes = self._closer, self._lanes
        self._forget()
        if lanes is not None:
            self._past += lanes.lanes
        closer()

    # ---------------------------------------------------------- for the user

    @property
    def steps(self) -> int:
        """Backward passes with communication so far."""
        return self._steps

    @property
    def bits(self) -> float | None:
        """Budget per coordinate; None for a codec of another kind.

        A new one holds from the next step on. Set it on all ranks between the same two steps: if one of them goes on
        with the old one, all of them raise `ConfigMismatchError` in that step. With CUDA tensors, where nobody looks
        at messages on the host, they may only notice by the timeout.
        """
        return self._settings.bits

    @bits.setter
    def bits(self, bits: float) -> None:
        settings = self._settings.with_bits(bits)
        if settings != self._settings:
            self._settings = settings
            self._changes += 1

    @property
    def exempt(self) -> Exempt | None:
        """Parameters that are averaged without compression, as they were given.

        New ones hold from the next step on, as new `bits` do. Parameters belong to the process: with a state that was
        copied or unpickled they have to be set again before it is used, and a function only if it cannot be pickled.
        """
        return self._exemption.given

    @exempt.setter
    def exempt(self, exempt: Exempt | None) -> None:
        self._exemption = Exemption(exempt)
        self._changes += 1

    @property
    def loss_scale(self) -> float:
        """By how much the loss is multiplied before the backward pass; 1 if it is not.

        Only error feedback asks for it: residuals are in units of the scaled gradient. Where a ``GradScaler`` changes
        the scale, tell it after every ``scaler.update()``: ``state.loss_scale = scaler.get_scale()``. Without that,
        residuals are of the wrong size in the step after a change, once, and right again afterwards.
        """
        return self._residuals.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ConfigError(f"loss_scale cannot be {scale!r}; allowed: a finite number above 0")
        self._residuals.scale = float(scale)

    def reset_residuals(self) -> None:
        """Forget what error feedback has kept, for instance when other parameters have been loaded into the model."""
        self._residuals.reset()

    def stats(self) -> Stats:
        """Totals of this rank since the state was made."""
        lanes = [*self._past, *([] if self._lanes is None else self._lanes.lanes)]
        return collect(
            lanes,
            steps=self._steps,
            seconds_exposed=self._exposed,
            seconds_hidden=self._hidden,
            backend=self._backend_name(),
        )

    def log_to(self, writer: Any, step: int) -> None:
        """Write the numbers of `stats` to TensorBoard, or to any ``writer`` with ``add_scalar(tag, value, step)``."""
        for name, value in dataclasses.asdict(self.stats()).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            for part, number in parts:
                if isinstance(number, (int, float)):
                    writer.add_scalar(f"dynamiq/{name}/{part}".rstrip("/"), number, step)

    def _backend_name(self) -> str:
        codec = self._codec or self._settings.codec
        if isinstance(codec, DynamiQ):
            return codec.operations.name
        return self._settings.backend if codec is None else repr(codec)

    def __repr__(self) -> str:
        codec = self._settings.codec or self._settings.config
        return f"DynamiQState({codec!r}, schedule={self._settings.schedule!r}, backend={self._backend_name()!r})"

    # --------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to continue with the same random numbers: plain numbers and text.

        With error feedback also this rank's residuals, as tensors: then every rank has to save its own. Call it between
        steps.
        """
        state: dict[str, Any] = {"version": _VERSION, "steps": self._steps, "codec": self._settings.fingerprint()}
        if self._settings.error_feedback:
            state["residuals"] = self._residuals.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another state stopped; on every rank.

        Settings stay those of this state; a warning says if the codec differs. The number of ranks may be another one:
        nothing is carried over that belongs to a rank but the residuals of error feedback, which are dropped with a
        warning on a rank to which they do not belong. A run continues bit for bit when also DDP's buckets are the same.
        DDP arranges them anew after the first backward pass, so make one before parameters, optimiser and state are
        loaded.

        Raises:
            ConfigError: the dictionary is not from `state_dict`, or from another version of it.
        """
        steps = state.get("steps")
        if state.get("version") != _VERSION or type(steps) is not int or steps < 0:
            raise ConfigError(f"state cannot be {dict(state)!r}; allowed: what state_dict of version {_VERSION} gave")
        mine = self._settings.fingerprint()
        if state.get("codec") != mine:
            warnings.warn(f"the state was saved with codec {state.get('codec')}, and goes on with {mine}", stacklevel=2)
        residuals = state.get("residuals")
        if residuals is not None and not self._settings.error_feedback:
            warnings.warn("the residuals that were saved are dropped, as error_feedback is False here", stacklevel=2)
        elif residuals is not None:
            self._residuals.load_state_dict(residuals)
        else:
            self._residuals.reset()
        self._steps = steps
        self._changes += 1  # so that the ranks compare their steps, too

    def __getstate__(self) -> dict[str, Any]:
        """Settings, steps and residuals. Process groups and transports belong to the process."""
        dropped = [name for name in ("process_group", "transport") if getattr(self, f"_{name}") is not None]
        return {
            "settings": self._settings.portable(),
            "exemption": self._exemption,
            "steps": self._steps,
            "dropped": dropped,
            "residuals": self._residuals.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings, self._exemption = state["settings"], state["exemption"]
        self._start(None, None, steps=state["steps"])
        self._residuals.load_state_dict(state["residuals"])
        for name in state["dropped"]:
            warnings.warn(
                f"{name} is not kept with a DynamiQState; it uses the default group from now on", stacklevel=2
            )


def _comparison(known: Mapping[str, object] | None, tensor: Tensor, *, changed: bool, first: bool) -> Comparison:
    """When to compare a bucket of which something is known: if that has changed, and the first one in every step.

    So a setting that is changed on one rank alone meets a comparison on all of them, in the next step.
    """
    if known is None:
        return "before"
    if tensor.is_cuda:  # where to compare makes the host wait
        return "before" if changed else "none"
    return "beside" if changed or first else "none"


def _completed(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(tensor)
    return future


def _nothing() -> None:
    """Closes nothing."""
