"""No operation of the codec reads a value of a device on the host: it would stall a stream at every hop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynamiq_core import CodecConfig, DynamiQ, Received

READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "is_pinned", "_to_sparse",
}  # fmt: skip
"""Operations that cannot finish, or cannot know the shape of their result, without the values."""

CONFIGS = [CodecConfig(), CodecConfig.paper(), CodecConfig(rounding="independent", bits=2.5), CodecConfig(widths=(4,))]
WORKERS, NUMEL = 2, 2000


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        if name in READS or masks:
            raise AssertionError(f"{func} reads values on the host")
        return func(*args, **(kwargs or {}))


def everything(codec: DynamiQ, gradients: list[Tensor]) -> Tensor:
    """Both phases of a ring, and the operation for callers that keep a sum."""
    device = gradients[0].device
    statistics = codec.merge_statistics([codec.statistics(x) for x in gradients])
    plan = codec.plan(statistics, NUMEL, device=device, workers=WORKERS, chunks=WORKERS)
    out = torch.empty(NUMEL, dtype=gradients[0].dtype, device=device)
    total = torch.zeros(NUMEL, device=device)
    for chunk in range(WORKERS):
        message = codec.compress(gradients[0], plan, chunk=chunk, slot=0)
        for slot in range(1, WORKERS):
            received = [Received(message, slot - 1)]
            message = codec.decompress_accumulate_recompress(received, gradients[slot], plan, chunk=chunk, slot=slot)
        codec.decompress(message, plan, chunk=chunk, slot=WORKERS - 1, out=out)
        codec.decompress_accumulate(message, total, plan, chunk=chunk, slot=WORKERS - 1)
    return out


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_operation_reads_a_value(config: CodecConfig, dtype: torch.dtype, normal) -> None:
    gradients = [x.to(dtype) for x in normal(0, WORKERS, NUMEL)]
    codec = DynamiQ(config)
    expected = everything(codec, gradients)
    with NoHostReads():
        watched = everything(codec, gradients)
    assert torch.equal(watched, expected)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["default", "paper"])
def test_runs_on_a_device_that_has_no_values(config: CodecConfig) -> None:
    """On the meta device any read fails, and so does an operation that mixes devices."""
    gradients = [torch.empty(NUMEL, device="meta")] * WORKERS
    out = everything(DynamiQ(config), gradients)
    assert (out.device.type, out.shape) == ("meta", (NUMEL,))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.long().unique(),
        lambda x: int(x.argmax()),
    ],
)
def test_the_watch_sees_reads(read: Any, normal) -> None:
    """Negative control of the first test."""
    with NoHostReads(), pytest.raises(AssertionError, match="reads values on the host"):
        read(normal(0, 10))
