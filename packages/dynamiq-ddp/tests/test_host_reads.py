"""Nothing that is computed reads a tensor's values on the host: on a GPU each such read would stall the queue."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynamiq_core import DynamiQ
from dynamiq_ddp import Meter, all_reduce, engine
from dynamiq_ddp.feedback import Feedback, Residual
from dynamiq_ddp.route import find_route

READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::bincount",
    "aten::unique_dim",
    "aten::_unique2",
}


class NoHostReads(TorchDispatchMode):
    """Refuses the operations that would wait for a device, and indexing by a mask, which counts."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name == "aten::index" else []
        if name in READS or masks:
            raise AssertionError(f"{func} reads values on the host")
        return func(*args, **(kwargs or {}))


def test_the_mode_sees_reads():
    x = torch.ones(3)
    for read in (lambda: float(x.sum()), lambda: x[x > 0], lambda: bool(x.any()), lambda: x.nonzero()):
        with NoHostReads(), pytest.raises(AssertionError, match="on the host"):
            read()


@pytest.mark.parametrize(
    ("schedule", "n"),
    [*((schedule, n) for schedule in ("ring", "butterfly", "direct") for n in (2, 3)), ("hierarchical:2", 4)],
)
def test_an_all_reduce_reads_nothing(schedule, n, ranks, random_rows, monkeypatch, same_bits):
    rows = random_rows(n, 3000)
    plain = ranks(
        n, lambda t: all_reduce(rows[t.rank].clone(), transport=t, codec=DynamiQ(), schedule=schedule, check=False)
    )
    # On CPU the comparison of headers is read at the end of each phase; on CUDA it is not.
    monkeypatch.setattr(engine, "_raise_if_wrong", lambda *_: None)

    def work(transport):
        tensor = rows[transport.rank].clone()
        with NoHostReads():
            all_reduce(tensor, transport=transport, codec=DynamiQ(), schedule=schedule, check=False)
        return tensor

    for result, expected in zip(ranks(n, work), plain, strict=True):
        assert same_bits(result, expected)


def test_error_feedback_reads_nothing(ranks, random_rows, monkeypatch):
    monkeypatch.setattr(engine, "_raise_if_wrong", lambda *_: None)
    rows, codec = random_rows(2, 3000), DynamiQ()

    def work(transport):
        residual = Residual()
        job = engine.Job(transport, codec, find_route("ring", transport.rank, 2), 0, 0, Meter())
        with NoHostReads():
            for scale in (1.0, 2.0):
                tensor = rows[transport.rank].clone()
                engine.reduce_tensor(tensor, job._replace(feedback=Feedback(residual, scale)))
        return residual.values

    assert all(values.count_nonzero() > 2000 for values in ranks(2, work))
