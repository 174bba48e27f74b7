"""The demo's corpus and batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dynamiq_core.errors import DynamiQError
from dynamiq_ddp.demo.data import batch, load_corpus, source_files


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A directory laid out like a standard library, with 30 modules of known text."""
    for index, name in enumerate(sorted(sys.stdlib_module_names)[:30]):
        (tmp_path / f"{name}.py").write_text(f"# file {index:02d}")
    return tmp_path


def test_sources_are_the_librarys_own(library: Path) -> None:
    for foreign in ("site-packages/thing.py", "thing.py", "json/tests/case.py", "test/case.py", "json/notes.txt"):
        (library / foreign).parent.mkdir(parents=True, exist_ok=True)
        (library / foreign).write_text("# foreign")
    (library / "json/decoder.py").write_text("# own")
    names = [path.relative_to(library).as_posix() for path in source_files(library)]
    assert names == sorted([f"{name}.py" for name in sorted(sys.stdlib_module_names)[:30]] + ["json/decoder.py"])


def test_split_is_by_file_and_in_order(library: Path) -> None:
    corpus = load_corpus(library)
    text = [bytes(part.tolist()).decode().split("\n") for part in corpus]
    assert text[1] == ["# file 09", "# file 19", "# file 29"]
    assert text[0] == [f"# file {index:02d}" for index in range(30) if index % 10 != 9]


def test_running_library_is_read_alike_twice() -> None:
    first, second = load_corpus(), load_corpus()
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert first.train.numel() > 5 * first.validation.numel() > 500_000


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ast.py").write_text("pass")
    with pytest.raises(DynamiQError, match=r"found 1 source files .* need 10"):
        load_corpus(tmp_path)


def test_batch_windows_come_from_the_text() -> None:
    text = torch.arange(251, dtype=torch.uint8)
    inputs, targets = batch(text, size=100, context=7, step=3, worker=1, seed=5)
    assert inputs.shape == targets.shape == (100, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))


def test_every_window_of_the_text_can_be_drawn() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    inputs, targets = batch(text, size=200, context=3, step=0, worker=0, seed=0)
    assert inputs[:, 0].unique().tolist() == [0, 1, 2]
    assert targets.max() == 5


def test_batches_are_functions_of_seed_step_and_worker() -> None:
    text = torch.randint(256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()

    def draw(step: int, worker: int, seed: int) -> tuple[int, ...]:
        return tuple(batch(text, size=4, context=16, step=step, worker=worker, seed=seed).inputs.flatten().tolist())

    keys = [(step, worker, seed) for step in range(5) for worker in range(5) for seed in range(3)]
    drawn = {key: draw(*key) for key in keys}
    assert len(set(drawn.values())) == len(keys)
    assert all(draw(*key) == drawn[key] for key in reversed(keys))
    assert torch.equal(torch.get_rng_state(), state)
