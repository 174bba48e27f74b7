"""Files with one gradient per rank, in every form in which people have them."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from dynamiq_core import InputError
from dynamiq_ddp.gradient_files import load_gradients

ROWS = torch.arange(24.0).view(2, 12)


def safetensors(path, tensors: dict[str, torch.Tensor], names: dict[torch.dtype, str]) -> None:
    """As the format's description says: length, header, bytes."""
    header, blob = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(blob), len(blob) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        blob += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int8: "I8"}


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
    """Numbers in names count as numbers, and values need not be aligned."""
    tensors = {f"rank{rank}": ROWS[0].to(dtype) + rank for rank in (10, 9, 1)}
    safetensors(tmp_path / "g.safetensors", tensors, NAMES)
    rows = load_gradients([tmp_path / "g.safetensors"])
    assert rows.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert torch.equal(rows.float(), ROWS[0] + torch.tensor([[1.0], [9.0], [10.0]]))
    safetensors(tmp_path / "m.safetensors", {"all": ROWS.to(dtype)}, NAMES)
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
    safetensors(tmp_path / "i8.safetensors", {"x": ROWS.to(torch.int8)}, NAMES)
    with pytest.raises(InputError, match=name):
        load_gradients([tmp_path / name])


def test_a_truncated_safetensors_file_is_an_error(tmp_path):
    path = tmp_path / "g.safetensors"
    safetensors(path, {"all": ROWS}, NAMES)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="no safetensors file"):
        load_gradients([path])
