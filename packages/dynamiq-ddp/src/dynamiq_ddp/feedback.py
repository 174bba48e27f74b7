"""Error feedback: what this rank's encodings of a bucket lost is added to the bucket's gradient of the next step.

Every rank encodes every chunk once, so it knows its own part of the error of the sum: what went into its encodings
minus what they carry. The error of the sum is exactly the sum of these parts over the ranks, whatever the schedule.
When every rank adds its part to its next gradient, errors do not pile up over the steps: after any number of them, the
sum of what was applied differs from that of the exact means by the mean of the last residuals, and by nothing else but
float32 rounding. That holds also for what is biased, such as super-groups of width 0.

Source of the method: Seide et al. 2014 (Interspeech) and Karimireddy et al. 2019 (arXiv 1901.09847), for one
compression per step; here one residual stands for all hops.

Shapes: d coordinates.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, ConfigError, Encoding, Received

Shapes = tuple[tuple[int, ...], ...]


class Residual:
    """What the last encodings of one bucket lost, on this rank.

    Attributes:
        values: float32 [d]; None where nothing is known yet, which counts as zero.
        scale: the loss scale in which they are expressed.
    """

    def __init__(self, values: Tensor | None = None, scale: float = 1.0) -> None:
        self.values = values
        self.scale = scale


class Feedback:
    """The part of one all-reduce that compensates the last one, and learns for the next one.

    Where the route has levels, all of it is about the part of the bucket that this rank encodes for its node: d is that
    part's, the gradient is the node's mean, and inside the node nothing is lost.

    Args:
        residual: of the bucket; changed when the all-reduce has succeeded, and not before.
        scale: loss scale of the gradient.
    """

    def __init__(self, residual: Residual, scale: float) -> None:
        self._residual = residual
        self._scale = scale
        self._encodings: list[Encoding] = []
        self._lost: Tensor | None = None

    def compensate(self, x: Tensor) -> Tensor:
        """A gradient [d] plus what was lost the last time, as a new float32 tensor."""
        total = x.to(torch.float32, copy=True)
        before = self._before(x.device)
        return total if before is None else total.add_(before)

    def add_to(self, exact: Tensor, *, times: int) -> None:
        """Add what was lost the last time to a float32 tensor [d], several times."""
        before = self._before(exact.device)
        if before is not None:
            exact.add_(before, alpha=times)

    def note(self, chunk: int, slot: int, received: Sequence[Received], message: Tensor) -> None:
        """Remember an encoding. Its message is copied, as its place will hold another one."""
        self._encodings.append(Encoding(chunk, slot, received, message.clone()))

    def learn(self, codec: Codec[Any], x: Tensor, plan: Any) -> None:
        """Find out what all noted encodings lost.

        Args:
            codec: that made them.
            x: from `compensate`, float32 [d].
            plan: of the all-reduce.
        """
        self._lost = codec.residual(self._encodings, x, plan)
        self._encodings.clear()

    def keep(self, mean: Tensor) -> None:
        """Keep what was learned, for the next step; nothing is read on the host.

        A mean that is not finite is not applied by anybody who scales the loss, and has the same bits on every rank.
        Then all of them keep what they had before. Another bucket of that step, whose mean was finite, has learned what
        its encodings of a gradient lost that is not applied either: noise of one residual's size, once. To undo that
        would take as much memory again.

        Args:
            mean: as the ranks received it, of the whole bucket.
        """
        if self._lost is None:  # nothing was encoded, as when there is a single node
            return
        before = self._before(mean.device)
        sound = mean.isfinite().all() & self._lost.isfinite().all()
        if before is None:
            self._residual.values = torch.where(sound, self._lost, 0.0)
        else:
            self._residual.values = torch.where(sound, self._lost, before)
        self._residual.scale = self._scale

    def _before(self, device: torch.device) -> Tensor | None:
        values = self._residual.values
        if values is None:
            return None
        values = values.to(device)
        if values.is_cuda:  # as loaded they may be of another stream, which must not have the memory back too early
            values.record_stream(torch.cuda.current_stream(device))
        return values if self._residual.scale == self._scale else values * (self._scale / self._residual.scale)


class Layout(NamedTuple):
    """What a residual fits: the parameters of a bucket in order, by what can be written down of them.

    Attributes:
        dtype: of the gradients.
        shapes: of the parameters.
        part: first coordinate, and number of coordinates, that this rank encodes; all but where the route has levels.
    """

    dtype: str
    shapes: Shapes
    part: tuple[int, int]


class _Entry(NamedTuple):
    layout: Layout
    parameters: tuple[weakref.ref[Tensor], ...] | None  # None: from a checkpoint, and not used yet
    residual: Residual


class Residuals:
    """The residuals of all buckets of a model on one rank, each good for one layout of its bucket."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._entries: dict[int, _Entry] = {}
        self._ranks: tuple[int, int] | None = None  # rank and number of ranks they belong to
        self._resets: dict[int, int] = {}  # of each bucket, in a row

    def feedback(self, bucket: int, layout: Layout, parameters: Sequence[Tensor], *, rank: int, size: int) -> Feedback:
        """The residual of a bucket, or a new one if the bucket is not the one that it was.

        Args:
            bucket: its index.
            layout: what it consists of.
            parameters: in the bucket's order; empty where they are not known.
            rank: this rank.
            size: number of ranks.
        """
        self._belong_to(rank, size)
        references = tuple(weakref.ref(parameter) for parameter in parameters)
        entry = self._entries.get(bucket)
        if entry is not None and entry.layout == layout and _are(entry.parameters, parameters):
            entry = entry._replace(parameters=references)
            self._resets[bucket] = 0
        else:
            if entry is not None:
                self._tell_of_a_reset(bucket, entry, layout)
            entry = _Entry(layout, references, Residual())
        self._entries[bucket] = entry
        return Feedback(entry.residual, self.scale)

    def reset(self) -> None:
        """Forget what was lost."""
        self._entries.clear()

    @property
    def numel(self) -> int:
        """Coordinates that are kept."""
        return sum(
            entry.residual.values.numel() for entry in self._entries.values() if entry.residual.values is not None
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, those of this rank."""
        rank, size = self._ranks or (0, 1)
        return {
            "rank": rank,
            "ranks": size,
            "loss_scale": self.scale,
            "buckets": {
                bucket: {
                    "dtype": entry.layout.dtype,
                    "shapes": [list(shape) for shape in entry.layout.shapes],
                    "part": list(entry.layout.part),
                    "loss_scale": entry.residual.scale,
                    "values": entry.residual.values.clone(),
                }
                for bucket, entry in self._entries.items()
                if entry.residual.values is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; what does not fit is dropped with a warning when its bucket comes.

        Raises:
            ConfigError: it is not from `state_dict`; nothing has changed.
        """
        try:
            entries = {
                int(bucket): _Entry(
                    layout := _layout(saved),
                    None,
                    Residual(_values(saved["values"], layout.part[1]), float(saved["loss_scale"])),
                )
                for bucket, saved in state["buckets"].items()
            }
            ranks = int(state["rank"]), int(state["ranks"])
            scale = float(state["loss_scale"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"residuals cannot be read: {error!r}; allowed: what state_dict gave") from error
        self._entries, self._ranks, self.scale = entries, ranks, scale
        self._resets.clear()

    def _belong_to(self, rank: int, size: int) -> None:
        if self._ranks is not None and self._ranks != (rank, size) and self._entries:
            was, ranks = self._ranks
            warnings.warn(
                f"residuals of {len(self._entries)} buckets are dropped: they are those of rank {was} of {ranks}, and "
                f"this is rank {rank} of {size}; error feedback starts anew",
                stacklevel=2,
            )
            self._entries.clear()
        self._ranks = rank, size

    def _tell_of_a_reset(self, bucket: int, entry: _Entry, layout: Layout) -> None:
        if entry.parameters is None:
            warnings.warn(
                f"the residual of bucket {bucket} is dropped: it was saved for {_words(entry.layout)}, and the bucket "
                f"now has {_words(layout)}; error feedback starts anew there. DDP arranges its buckets anew after the "
                "first backward pass: make one before a checkpoint is loaded",
                stacklevel=2,
            )
        # DDP itself changes them once for each model. Models that share a state change them all the time.
        self._resets[bucket] = self._resets.get(bucket, 0) + 1
        if self._resets[bucket] == 3:
            warnings.warn(
                f"bucket {bucket} has changed its parameters {self._resets[bucket]} times in a row, and its residual "
                "was dropped each time; error feedback needs a state of its own for each model",
                stacklevel=2,
            )


def _are(references: tuple[weakref.ref[Tensor], ...] | None, parameters: Sequence[Tensor]) -> bool:
    """Whether these are the parameters that were referred to; from a checkpoint nobody knows, and shapes must do."""
    if references is None:
        return True
    if len(references) != len(parameters):
        return False
    return all(reference() is parameter for reference, parameter in zip(references, parameters, strict=True))


def _layout(saved: Mapping[str, Any]) -> Layout:
    first, number = map(int, saved["part"])
    return Layout(str(saved["dtype"]), tuple(tuple(map(int, shape)) for shape in saved["shapes"]), (first, number))


def _values(values: Tensor, number: int) -> Tensor:
    if values.dtype != torch.float32 or values.shape != (number,):
        raise ValueError(f"{values.dtype} of shape {tuple(values.shape)} for {number} coordinates")
    return values.detach().clone()


def _words(layout: Layout) -> str:
    shown = ", ".join("x".join(map(str, shape)) or "a scalar" for shape in layout.shapes[:4])
    rest = f" and {len(layout.shapes) - 4} more" if len(layout.shapes) > 4 else ""
    first, number = layout.part
    return f"{shown}{rest} of {layout.dtype}, of which this rank encodes {number} from {first} on"
