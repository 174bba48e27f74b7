"""Files with one gradient per rank, in every form in which people have them."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from dynamiq_core import InputError
from dynamiq_ddp.gradient_files import load_gradients

ROWS = torch.arange(24.0).view(2, 12)


@pytest.mark.parametrize(
    "held",
    [
        ROWS,
        [ROWS[0], ROWS[1]],
        (ROWS[0].view(3, 4), ROWS[1].view(3, 4)),
        {"rank1": ROWS[1], "rank0": ROWS[0]},
        ROWS.double(),
    ],
    ids=["matrix", "list", "shapes", "names", "float64"],
)
def test_one_file_with_all_ranks(held, tmp_path):
    torch.save(held, tmp_path / "g.pt")
    assert torch.equal(load_gradients([tmp_path / "g.pt"]), ROWS)
    assert torch.equal(load_gradients([tmp_path / "g.pt"], limit=5), ROWS[:, :5])


def test_several_files_in_their_order(tmp_path):
    for rank in range(2):
        torch.save(ROWS[rank].view(4, 3), tmp_path / f"{rank}.pt")
    assert torch.equal(load_gradients([tmp_path / "1.pt", tmp_path / "0.pt"]), ROWS.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_safetensors(dtype, tmp_path):
    """Numbers in names count as numbers."""
    tensors = {f"rank{rank}": ROWS[0].to(dtype) + rank for rank in (10, 9, 1)}
    save_file(tensors, tmp_path / "g.safetensors")
    rows = load_gradients([tmp_path / "g.safetensors"])
    assert rows.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert torch.equal(rows.float(), ROWS[0] + torch.tensor([[1.0], [9.0], [10.0]]))
    save_file({"all": ROWS.to(dtype)}, tmp_path / "m.safetensors")
    assert torch.equal(load_gradients([tmp_path / "m.safetensors"]).float(), ROWS)


def test_mixed_dtypes_become_float32(tmp_path):
    torch.save([ROWS[0].half(), ROWS[1].bfloat16()], tmp_path / "g.pt")
    rows = load_gradients([tmp_path / "g.pt"])
    assert rows.dtype == torch.float32
    assert torch.equal(rows, ROWS)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([ROWS[0], ROWS[1, :5]], "same number of coordinates on every rank, not 12, 5"),
        ([ROWS[0].int()] * 2, "gradients cannot be torch.int32"),
        ([torch.empty(0)] * 2, "same number of coordinates"),
        ({"loss": 3}, "holds no tensors"),
        ([], "holds no tensors"),
    ],
)
def test_what_is_not_gradients_is_named(held, message, tmp_path):
    torch.save(held, tmp_path / "g.pt")
    with pytest.raises(InputError, match=message):
        load_gradients([tmp_path / "g.pt"])


@pytest.mark.parametrize("name", ["absent.pt", "absent.safetensors", "text.pt", "text.safetensors", "i8.safetensors"])
def test_files_that_cannot_be_read_are_named(name, tmp_path):
    for text in ("text.pt", "text.safetensors"):
        (tmp_path / text).write_text("these are no gradients at all")
    save_file({"x": ROWS.to(torch.int8)}, tmp_path / "i8.safetensors")
    with pytest.raises(InputError, match=name):
        load_gradients([tmp_path / name])


def test_nobody_is_advised_to_let_a_file_run_code(tmp_path):
    torch.save({"rows": ROWS, "path": tmp_path}, tmp_path / "g.pt")  # a pickled object that is no tensor
    with pytest.raises(InputError, match=r"g\.pt cannot be read: it is no file of tensors \(UnpicklingError\)$"):
        load_gradients([tmp_path / "g.pt"])


def test_a_truncated_safetensors_file_is_an_error(tmp_path):
    path = tmp_path / "g.safetensors"
    save_file({"all": ROWS}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"g\.safetensors cannot be read"):
        load_gradients([path])


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    save_file({"all": ROWS}, tmp_path / "g.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(InputError, match=r"needs the package safetensors.*dynamiq-ddp\[safetensors\]"):
        load_gradients([tmp_path / "g.safetensors"])
