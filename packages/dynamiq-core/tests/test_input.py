"""Bad input: an error of ours that names the value and what is allowed, and nothing has been changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq_core import DynamiQ, DynamiQError, DynamiQPlan, InputError, Received

CPU = torch.device("cpu")
NUMEL, WORKERS, CHUNKS = 1000, 2, 3


@pytest.fixture
def codec() -> DynamiQ:
    return DynamiQ()


@pytest.fixture
def plan(codec: DynamiQ, plan_of, normal) -> DynamiQPlan:
    made: DynamiQPlan = plan_of(list(normal(0, WORKERS, NUMEL)), codec, chunks=CHUNKS)
    return made


VECTORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(NUMEL, dtype=torch.int32), r"float32, bfloat16 or float16, not torch\.int32"),
    (lambda: torch.ones(NUMEL, dtype=torch.float64), r"float32, bfloat16 or float16, not torch\.float64"),
    (lambda: torch.ones(NUMEL, dtype=torch.complex64), r"float32, bfloat16 or float16, not torch\.complex64"),
    (lambda: torch.ones(NUMEL, dtype=torch.bool), r"float32, bfloat16 or float16, not torch\.bool"),
    (lambda: torch.ones(2 * NUMEL)[::2], r"contiguous vector, not of shape \(1000,\), strides \(2,\)"),
    (lambda: torch.ones(10, 100), r"contiguous vector, not of shape \(10, 100\)"),
    (lambda: torch.ones(10, 100).t(), r"contiguous vector, not of shape \(100, 10\)"),
    (lambda: torch.tensor(1.0), r"contiguous vector, not of shape \(\)"),
    (lambda: torch.empty(0), "must not be empty"),
    (lambda: [1.0, 2.0], "must be a tensor, not list"),
    (lambda: None, "must be a tensor, not NoneType"),
]
OF_ANOTHER_PLAN: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(NUMEL + 1), "has 1001 coordinates, the plan is for 1000"),
    (lambda: torch.ones(NUMEL, device="meta"), "is on meta, the plan on cpu"),
]


def refuses(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=message) as raised:
        call()
    assert isinstance(raised.value, DynamiQError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(("bad", "message"), VECTORS)
def test_statistics_of_bad_vectors(bad: Callable[[], Any], message: str, codec: DynamiQ) -> None:
    refuses(f"^x .*{message}", lambda: codec.statistics(bad()))


@pytest.mark.parametrize(("bad", "message"), VECTORS + OF_ANOTHER_PLAN)
def test_bad_vectors_in_every_operation(
    bad: Callable[[], Any], message: str, codec: DynamiQ, plan: DynamiQPlan, normal
) -> None:
    """The other tensors of the call are as they were."""
    sent = codec.compress(normal(0, NUMEL), plan, chunk=0, slot=0)
    before, out = sent.clone(), torch.full_like(sent, 0x77)
    refuses(f"^x .*{message}", lambda: codec.compress(bad(), plan, chunk=0, slot=0, out=out))
    refuses(
        f"^x .*{message}",
        lambda: codec.decompress_accumulate_recompress([Received(sent, 0)], bad(), plan, chunk=0, slot=1, out=out),
    )
    refuses(f"^out .*{message}", lambda: codec.decompress(sent, plan, chunk=0, slot=0, out=bad()))
    refuses(f"^total .*{message}", lambda: codec.decompress_accumulate(sent, bad(), plan, chunk=0, slot=0))
    assert torch.equal(sent, before)
    assert (out == 0x77).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_is_kept_in_float32(dtype: torch.dtype, codec: DynamiQ, plan: DynamiQPlan, normal) -> None:
    sent = codec.compress(normal(0, NUMEL), plan, chunk=0, slot=0)
    total = torch.ones(NUMEL, dtype=dtype)
    refuses(
        f"total must be float32, not {dtype}", lambda: codec.decompress_accumulate(sent, total, plan, chunk=0, slot=0)
    )
    assert (total == 1).all()


@pytest.mark.parametrize(
    ("chunk", "slot", "message"),
    [
        (3, 0, "chunk must be from 0 to 2, not 3"),
        (-1, 0, "chunk must be from 0 to 2, not -1"),
        (0, 2, "slot must be from 0 to 1, not 2"),
        (0, -1, "slot must be from 0 to 1, not -1"),
    ],
)
def test_chunks_and_slots_out_of_range(
    chunk: int, slot: int, message: str, codec: DynamiQ, plan: DynamiQPlan, normal
) -> None:
    x = normal(0, NUMEL)
    kept, out = x.clone(), torch.full((NUMEL,), 5.0)
    sent = codec.compress(x, plan, chunk=0, slot=0)
    refuses(message, lambda: codec.compress(x, plan, chunk=chunk, slot=slot))
    refuses(message, lambda: codec.decompress(sent, plan, chunk=chunk, slot=slot, out=out))
    refuses(message, lambda: codec.decompress_accumulate(sent, out, plan, chunk=chunk, slot=slot))
    if chunk == 0:
        received = [Received(sent, slot)]
        refuses(message, lambda: codec.decompress_accumulate_recompress(received, x, plan, chunk=0, slot=1))
    assert torch.equal(x, kept)
    assert (out == 5).all()


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (lambda size: torch.zeros(size + 1, dtype=torch.uint8), "torch.uint8 of shape ({0}+1,)"),
        (lambda size: torch.zeros(size - 1, dtype=torch.uint8), "torch.uint8 of shape ({0}-1,)"),
        (lambda size: torch.zeros(0, dtype=torch.uint8), "torch.uint8 of shape (0,)"),
        (lambda size: torch.zeros(size, dtype=torch.int8), "torch.int8 of shape ({0}+0,)"),
        (lambda size: torch.zeros(1, size, dtype=torch.uint8), "torch.uint8 of shape (1, {0}+0)"),
        (lambda size: torch.zeros(2 * size, dtype=torch.uint8)[::2], "torch.uint8 of shape ({0}+0,)"),
    ],
)
def test_messages_of_the_wrong_kind(
    bad: Callable[[int], Tensor], found: str, codec: DynamiQ, plan: DynamiQPlan, normal
) -> None:
    size, x, out = plan.sizes[0], normal(0, NUMEL), torch.full((NUMEL,), 5.0)
    shape = re.sub(r"\{0\}([+-]\d)", lambda m: str(size + int(m[1])), found)
    message = re.escape(f"of chunk 0 must be {size} contiguous bytes, not {shape}")
    refuses(f"^message {message}", lambda: codec.decompress(bad(size), plan, chunk=0, slot=0, out=out))
    refuses(f"^message {message}", lambda: codec.decompress_accumulate(bad(size), out, plan, chunk=0, slot=0))
    refuses(f"^out {message}", lambda: codec.compress(x, plan, chunk=0, slot=0, out=bad(size)))
    received = [Received(bad(size), 0)]
    refuses(f"^message {message}", lambda: codec.decompress_accumulate_recompress(received, x, plan, chunk=0, slot=1))
    assert (out == 5).all()


def test_messages_on_another_device(codec: DynamiQ, plan: DynamiQPlan, normal) -> None:
    elsewhere = torch.empty(plan.sizes[0], dtype=torch.uint8, device="meta")
    out = torch.full((NUMEL,), 5.0)
    refuses("message is on meta, the plan on cpu", lambda: codec.decompress(elsewhere, plan, chunk=0, slot=0, out=out))
    assert (out == 5).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statistics": None}, "bfloat16 rows of phase 1, not None"),
        ({"statistics": torch.zeros(4, 2)}, r"bfloat16 rows of phase 1, not torch\.float32"),
        ({"statistics": torch.zeros(3, 2).bfloat16()}, r"shape \(3, 2\) do not belong to 1000 coordinates"),
        ({"statistics": torch.zeros(4, 3).bfloat16()}, r"shape \(4, 3\) do not belong to 1000 coordinates"),
        ({"numel": 0}, "positive, not 2, 3 and 0"),
        ({"numel": 1025}, "do not belong to 1025 coordinates"),
        ({"workers": 0}, "positive, not 0, 3 and 1000"),
        ({"chunks": 0}, "positive, not 2, 0 and 1000"),
        ({"gain": 0.0}, "gain must be a positive number, not 0.0"),
        ({"gain": -1.0}, "gain must be a positive number, not -1.0"),
        ({"gain": float("nan")}, "gain must be a positive number, not nan"),
        ({"gain": float("inf")}, "gain must be a positive number, not inf"),
    ],
)
def test_plans_that_cannot_be(changes: dict[str, Any], message: str, codec: DynamiQ) -> None:
    arguments: dict[str, Any] = {
        "statistics": torch.zeros(4, 2).bfloat16(),
        "numel": NUMEL,
        "workers": WORKERS,
        "chunks": CHUNKS,
    } | changes
    refuses(message, lambda: codec.plan(arguments.pop("statistics"), arguments.pop("numel"), device=CPU, **arguments))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one worker are needed, not of 0"),
        ([torch.zeros(4, 2).bfloat16(), torch.zeros(3, 2).bfloat16()], "3 super-groups do not fit those of 4"),
        ([torch.zeros(4, 2)], r"bfloat16 \[M, 2\], not torch\.float32 of shape \(4, 2\)"),
        ([torch.zeros(4).bfloat16()], r"bfloat16 \[M, 2\], not torch\.bfloat16 of shape \(4,\)"),
        ([torch.zeros(4, 3).bfloat16()], r"bfloat16 \[M, 2\], not torch\.bfloat16 of shape \(4, 3\)"),
    ],
)
def test_statistics_that_do_not_fit_together(parts: list[Tensor], message: str, codec: DynamiQ) -> None:
    refuses(message, lambda: codec.merge_statistics(parts))
