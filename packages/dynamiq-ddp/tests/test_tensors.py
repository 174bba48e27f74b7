"""Which tensors can be averaged, how they may lie in memory, and what is said about all others."""

import pytest
import torch
from torch import nn

from dynamiq_core import ConfigError, DynamiQError, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import ConfigMismatchError, all_reduce, simulate


@pytest.fixture
def averaged(ranks):
    """``averaged(make, codec)``: the tensor that ``make(rank)`` gives on each of three ranks, after the all-reduce."""

    def run(make, codec):
        def work(transport):
            tensor = make(transport.rank)
            assert all_reduce(tensor, transport=transport, codec=codec) is tensor
            return tensor

        results = ranks(3, work)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return run


VIEWS = {
    "scalar": lambda base: base[0, 0],
    "matrix": lambda base: base,
    "transposed": lambda base: base.t(),
    "every other column": lambda base: base[:, ::2],
    "a column": lambda base: base[:, 3],
    "rows": lambda base: base[3:5],
    "channels last": lambda base: base.view(2, 5, 4, 3).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_written_and_their_neighbours_are_not(view, averaged, random_rows, codec, same_bits):
    rows = random_rows(3, 120)
    bases = [row.view(10, 12).clone() for row in rows]
    flat = torch.stack([VIEWS[view](base).flatten() for base in bases])
    expected = simulate(flat, codec=codec).mean
    for rank, result in enumerate(averaged(lambda rank: VIEWS[view](bases[rank]), codec)):
        assert same_bits(result.flatten(), expected)
        untouched = rows[rank].view(10, 12).clone()
        VIEWS[view](untouched).copy_(result)
        assert same_bits(bases[rank], untouched)


def test_a_parameter_is_averaged_without_being_tracked(averaged):
    def make(rank):
        return nn.Parameter(torch.full((4, 2), float(rank)))

    for result in averaged(make, BF16()):
        assert result.is_leaf
        assert result.requires_grad
        assert torch.equal(result, torch.ones(4, 2))


def test_an_imaginary_part_that_is_negated_lazily(averaged):
    def make(rank):
        return torch.full((4,), complex(0, float(rank))).conj().imag

    for result in averaged(make, BF16()):
        assert torch.equal(result, torch.full((4,), -1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype, averaged):
    for result in averaged(lambda rank: torch.full((9,), float(rank), dtype=dtype), BF16()):
        assert result.dtype == dtype
        assert torch.equal(result, torch.ones(9, dtype=dtype))


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct", "hierarchical:1", "auto"])
def test_one_rank_changes_and_sends_nothing(schedule, ranks, recorder, random_rows, codec):
    row = random_rows(1, 50)[0]

    def work(transport):
        recorded = recorder(transport)
        return all_reduce(row.clone(), transport=recorded, codec=codec, schedule=schedule), recorded.exchanges

    ((result, exchanges),) = ranks(1, work)
    assert torch.equal(result, row)
    assert exchanges == 0


BAD = {
    "integer": (torch.arange(6), "torch.int64"),
    "boolean": (torch.ones(6, dtype=torch.bool), "torch.bool"),
    "double": (torch.ones(6).double(), "torch.float64"),
    "complex": (torch.ones(6, dtype=torch.complex64), "torch.complex64"),
    "empty": (torch.ones(0, 3), r"empty, of shape \(0, 3\)"),
    "expanded": (torch.ones(1).expand(6), r"share memory, as with strides \(0,\)"),
    "sparse": (torch.ones(2, 3).to_sparse(), "torch.sparse_coo"),
    "meta": (torch.ones(6, device="meta"), "on meta"),
    "list": ([1.0, 2.0], "a list"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", BAD)
def test_other_tensors_are_refused_on_every_rank(kind, size, ranks):
    tensor, words = BAD[kind]
    for error in ranks(size, lambda transport: all_reduce(tensor, transport=transport, codec=BF16())):
        assert isinstance(error, InputError)
        with pytest.raises(InputError, match=rf"tensor cannot be .*{words}.*allowed|tensor cannot have .*{words}"):
            raise error


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tensor_on_one_rank_is_an_error_on_all(kind, ranks):
    bad, _ = BAD[kind]
    good = [torch.ones(6) for _ in range(3)]

    def work(transport):
        tensor = bad if transport.rank == 1 else good[transport.rank]
        return all_reduce(tensor, transport=transport, codec=BF16())

    errors = ranks(3, work)
    assert [type(error) for error in errors] == [ConfigMismatchError] * 3
    assert "tensor cannot" in str(errors[0])
    assert "on rank 1" in str(errors[0])
    assert all(torch.equal(tensor, torch.ones(6)) for tensor in good)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"step": -1}, InputError, "step cannot be -1"),
        ({"bucket": 1.5}, InputError, "bucket cannot be 1.5"),
        ({"schedule": "star"}, ConfigError, "schedule cannot be 'star'; allowed: ring, butterfly, direct"),
        ({"codec": None}, ConfigError, "codec cannot be None"),
    ],
)
def test_other_arguments_are_refused_on_every_rank(arguments, kind, words, ranks):
    tensors = [torch.ones(6) for _ in range(2)]

    def work(transport):
        return all_reduce(tensors[transport.rank], **{"transport": transport, "codec": BF16(), **arguments})

    for error in ranks(2, work):
        assert isinstance(error, kind)
        assert isinstance(error, DynamiQError)
        assert words in str(error)
    assert all(torch.equal(tensor, torch.ones(6)) for tensor in tensors)
