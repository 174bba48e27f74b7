"""Parameters whose gradients are averaged without compression, though they share a bucket with others.

Shapes: d coordinates of a bucket.
"""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import ConfigError, InputError

Exempt = Callable[[Tensor], bool] | Iterable[Tensor]
"""Says of a parameter whether it is exempt, or lists those that are."""


class Ranges(NamedTuple):
    """Where the exempt coordinates of a bucket are.

    Attributes:
        lengths: of the pieces that a bucket falls into, in order.
        exempt: for each piece, whether it is exempt; neighbours differ.
    """

    lengths: tuple[int, ...]
    exempt: tuple[bool, ...]

    @property
    def compressed(self) -> int:
        """How many coordinates are left to compress."""
        return sum(length for length, kind in zip(self.lengths, self.exempt, strict=True) if not kind)

    @property
    def some(self) -> bool:
        """Whether there are both kinds."""
        return len(self.lengths) > 1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of what is to be compressed and of what is exempt, of a bucket [d]."""
        pieces = torch.split(x, list(self.lengths))
        return torch.cat(pieces[self.exempt.index(False) :: 2]), torch.cat(pieces[self.exempt.index(True) :: 2])

    def join(self, rest: Tensor, exempt: Tensor, out: Tensor) -> None:
        """Write both parts back to where they belong in ``out`` [d]."""
        places = dict.fromkeys((True, False), 0)
        for piece, kind in zip(torch.split(out, list(self.lengths)), self.exempt, strict=True):
            part, at = (exempt if kind else rest), places[kind]
            piece.copy_(part[at : at + piece.numel()])
            places[kind] = at + piece.numel()

    def __str__(self) -> str:
        total = sum(self.lengths) - self.compressed
        if not total:
            return "nothing"
        digest = hashlib.blake2b(repr(tuple(self)).encode(), digest_size=4).hexdigest()
        return f"{total} of {sum(self.lengths)} coordinates ({digest})"


class Exemption:
    """What a user has said of exempt parameters.

    Args:
        exempt: a function, or parameters, which are told apart by identity; None for none.

    Attributes:
        given: what was given, as a tuple if it was parameters.

    Raises:
        ConfigError: it is something else.
    """

    given: Exempt | None

    def __init__(self, exempt: Exempt | None) -> None:
        self._predicate: Callable[[Tensor], bool] | None = None
        self._listed: dict[int, weakref.ref[Tensor]] = {}
        self._decided: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._forgotten = self._told = False
        self.given = exempt
        if exempt is None:
            return
        if callable(exempt):
            self._predicate = exempt
            return
        if isinstance(exempt, (Tensor, str)) or not isinstance(exempt, Iterable):
            raise ConfigError(f"exempt cannot be {exempt!r}; allowed: parameters of the model, or a function of one")
        self.given = tuple(exempt)
        for parameter in self.given:
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"exempt cannot contain {parameter!r}; allowed: parameters of the model, or a function of one"
                )
            self._listed[id(parameter)] = weakref.ref(parameter)

    def __bool__(self) -> bool:
        return self._predicate is not None or bool(self._listed) or self._forgotten

    def ranges(self, numel: int, parameters: Sequence[Tensor]) -> Ranges:
        """What is exempt in a bucket.

        Args:
            numel: number of coordinates d.
            parameters: of the bucket, in order.

        Raises:
            ConfigError: the parameters that were listed are gone, as after pickling, or the function raised an error.
            InputError: the parameters are not given, so nobody can tell.
        """
        if self._forgotten:
            raise ConfigError(
                "exempt was given as parameters, which belong to the process; they were not kept with the state, so "
                "set state.exempt again before it is used"
            )
        if not self:
            return Ranges((numel,), (False,))
        if sum(parameter.numel() for parameter in parameters) != numel:
            raise InputError(
                f"a bucket of {numel} coordinates with parameters of "
                f"{[parameter.numel() for parameter in parameters]} cannot have exempt ones; allowed: those of DDP"
            )
        lengths: list[int] = []
        exempt: list[bool] = []
        for parameter in parameters:
            if not parameter.numel():
                continue
            kind = self._covers(parameter)
            if exempt and exempt[-1] is kind:
                lengths[-1] += parameter.numel()
            else:
                lengths.append(parameter.numel())
                exempt.append(kind)
        return Ranges(tuple(lengths), tuple(exempt))

    def others(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of some parameters that are not exempt."""
        return [parameter for parameter in parameters if not self._covers(parameter)]

    def unseen(self) -> list[Tensor]:
        """Trainable parameters that were listed and came in no bucket of the first step; told once."""
        if self._told or not self._decided:
            return []
        self._told = True
        listed = [reference() for key, reference in self._listed.items() if key not in self._decided]
        return [parameter for parameter in listed if parameter is not None and parameter.requires_grad]

    def _covers(self, parameter: Tensor) -> bool:
        """Decided once for each parameter, so that it cannot change unnoticed on one rank."""
        reference, decision = self._decided.get(id(parameter), (None, False))
        if reference is None or reference() is not parameter:
            decision = self._ask(parameter)
            listed = self._listed.get(id(parameter))
            decision = decision or (listed is not None and listed() is parameter)
            self._decided[id(parameter)] = weakref.ref(parameter), decision
        return decision

    def _ask(self, parameter: Tensor) -> bool:
        """What the user's function says. It may fail on one rank alone, and then the others have to be told."""
        if self._predicate is None:
            return False
        try:
            return bool(self._predicate(parameter))
        except Exception as error:
            raise ConfigError(
                f"exempt cannot be {self._predicate!r}, which raised {error!r} for a parameter of shape "
                f"{tuple(parameter.shape)}; allowed: a function that says True or False"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """A function that can be pickled; of parameters only that there were some."""
        predicate = self._predicate
        try:
            pickle.dumps(predicate)
        except (pickle.PicklingError, AttributeError, TypeError):
            predicate = None
        return {"predicate": predicate, "forgotten": bool(self) and predicate is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["predicate"])  # type: ignore[misc]
        self._forgotten = state["forgotten"]
