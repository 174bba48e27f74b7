"""Hierarchical all-reduces: exact inside a node, compressed between nodes, and the same bits on all ranks."""

import pickle

import pytest
import torch

from dynamiq_core import ConfigError, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, ConfigMismatchError, DynamiQState, Meter, all_reduce, dynamiq_hook, simulate
from dynamiq_ddp.route import find_route
from dynamiq_kernels import operations
from dynamiq_transport import LocalTransport, butterfly, hierarchical

FITTING = [(n, m) for n in (1, 2, 3, 4, 6, 8) for m in range(1, n + 1) if n % m == 0]


def integers(n, d, seed=0):
    """Sums of them are exact in float32, in whatever order they are taken."""
    return torch.randint(-1000, 1000, (n, d), generator=torch.Generator().manual_seed(seed)).float()


def composed(rows, m, codec, between, *, step=0, bucket=0):
    """Node means, then every part averaged between the nodes by an all-reduce without levels."""
    nodes = rows.view(-1, m, rows.shape[1]).sum(dim=1) / m
    parts = [
        simulate(part.contiguous(), codec=codec, schedule=between, step=step, bucket=bucket * m + index).mean
        for index, part in enumerate(torch.tensor_split(nodes, m, dim=1))
        if part.numel()
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(("n", "m"), FITTING)
def test_equals_its_parts_composed_by_hand(n, m, same_bits):
    """With nodes of one rank that is the outer schedule itself; and fewer coordinates than ranks are none on some."""
    for d in (1, 5, 1001):
        rows = integers(n, d)
        for between in ("ring", "butterfly", "direct"):
            found = simulate(rows, codec=BF16(), schedule=hierarchical(m, between=between), bucket=3).mean
            assert same_bits(found, composed(rows, m, BF16(), between, bucket=3))


@pytest.mark.parametrize("d", [5, 3001])
@pytest.mark.parametrize(("n", "m"), [(4, 1), (4, 2), (6, 2), (6, 3), (8, 2), (3, 3)])
def test_equals_its_parts_composed_by_hand_when_compressed(n, m, d, same_bits):
    codec, rows = DynamiQ(operations=operations()), integers(n, d)
    found = simulate(rows, codec=codec, schedule=hierarchical(m, between="butterfly"), step=2, bucket=3)
    assert same_bits(found.mean, composed(rows, m, codec, "butterfly", step=2, bucket=3))
    assert (found.vnmse > 1e-6) == (n > m)  # something was rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_node_of_all_ranks_is_exact(n, dtype, random_rows):
    rows = random_rows(n, 1000, dtype=dtype)
    mean = simulate(rows, codec=DynamiQ(), schedule=hierarchical(n)).mean
    exact = rows.double().mean(dim=0)
    rounding = n * 2.0**-24 * rows.double().abs().mean(dim=0) + torch.finfo(dtype).eps / 2 * exact.abs() + 1e-7
    assert mean.dtype == dtype
    assert ((mean.double() - exact).abs() <= rounding).all()


def test_partial_sums_do_not_overflow():
    rows = torch.full((4, 300), 60000.0, dtype=torch.float16)
    for m in (2, 4):
        mean = simulate(rows, codec=DynamiQ(), schedule=hierarchical(m)).mean
        assert ((mean.double() - 60000).abs() <= 600).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("m", [2, 3, 6])
def test_a_value_that_is_not_finite_is_seen_by_all_and_harms_no_other_super_group(m, value, codec, random_rows):
    rows = random_rows(6, 6 * 512)
    rows[4, 700] = value
    mean = simulate(rows, codec=codec, schedule=hierarchical(m)).mean  # which compares all ranks
    assert not mean[700].isfinite()
    assert mean[:512].isfinite().all()
    assert mean[768:].isfinite().all()


def test_the_parts_have_random_numbers_of_their_own():
    """The same values in both parts: rounded alike, their errors would be one and the same."""
    half = torch.randn(4, 2560, generator=torch.Generator().manual_seed(0))
    mean = simulate(torch.cat([half, half], dim=1), codec=DynamiQ(), schedule=hierarchical(2)).mean
    errors = mean.view(2, -1).double() - half.double().mean(dim=0)
    correlation = float(torch.corrcoef(errors)[0, 1])
    assert abs(correlation) < 6 / 2560**0.5


def test_nodes_of_nodes(random_rows, same_bits):
    rows, codec = integers(8, 2000), BF16()
    nested = simulate(rows, codec=codec, schedule=hierarchical(2, between=hierarchical(2, between=butterfly))).mean
    once = simulate(rows, codec=codec, schedule=hierarchical(4)).mean
    assert same_bits(nested, once)  # two racks: one encoding each, and one of their sum


@pytest.mark.parametrize(("n", "m"), [(4, 2), (6, 3), (6, 2), (8, 8)])
def test_every_byte_is_counted_where_it_travels(n, m, ranks, recorder, random_rows):
    d, item = 20_001, 2
    rows = random_rows(n, d, dtype=torch.bfloat16)

    def count(transport):
        meter, recorded = Meter(), recorder(transport)
        row = rows[transport.rank].clone()
        all_reduce(row, transport=recorded, codec=DynamiQ(), schedule=hierarchical(m), meter=meter)
        return meter, recorded.sent

    sent_between = moved_between = 0
    for rank, (meter, sent) in enumerate(ranks(n, count)):
        assert meter.bytes_sent == sum(size for _, size in sent)
        part = torch.tensor_split(torch.empty(d), m)[rank % m].numel()
        moved = d - part + (m - 1) * part
        assert meter.bytes["node"] == moved * item + 2 * (m - 1) * 16
        assert meter.coordinates_node == moved
        assert meter.all_reduces == 1
        beyond = {peer for peer, size in sent if peer // m != rank // m and size != 16}  # 16 are those of agreement
        assert all(peer % m == rank % m for peer in beyond)
        sent_between += meter.bytes["statistics"] + meter.bytes["gradient"]
        moved_between += meter.coordinates - meter.coordinates_node
    if m < n:
        assert 4.8 < 8 * sent_between / moved_between <= 5.0
    assert moved_between == pytest.approx(2 * (n // m - 1) * d)


def test_number_of_messages_and_steps(ranks, recorder):
    """One batch per step: two inside the node, two for the statistics of two nodes, and two for the ring of two."""

    def count(transport):
        recorded = recorder(transport)
        all_reduce(torch.ones(9000), transport=recorded, codec=DynamiQ(), schedule=hierarchical(4), check=False)
        return recorded.exchanges, len(recorded.sent)

    assert ranks(8, count) == [(6, 2 * 3 + 2 + 2)] * 8


@pytest.mark.parametrize("exchange", range(6))
def test_a_damaged_header_is_reported_and_leaves_nobody_waiting(exchange, ranks, recorder):
    """Of rank 0's exchanges the first and the last are inside its node, the others with rank 2."""
    knows = {0: 4, 1: 4, 2: 4, 3: 4, 4: 2, 5: 1}[exchange]  # what is damaged when finished may be whole elsewhere

    def work(transport):
        def damage(number, peer, tensor):
            if transport.rank == 0 and number == exchange:
                tensor[12] += 1  # the step of the first header

        recorded = recorder(transport, damage)
        tensor, caught = torch.full((1000,), float(transport.rank)), None
        try:
            all_reduce(tensor, transport=recorded, codec=DynamiQ(), schedule="hierarchical:2", check=False, step=5)
        except CommunicationError as error:
            caught = error
        after = all_reduce(torch.full((9,), float(transport.rank)), transport=recorded, codec=BF16(), step=6)
        return tensor, caught, after

    results = ranks(4, work)
    assert sum(error is not None for _, error, _ in results) == knows
    for rank, (tensor, error, after) in enumerate(results):
        assert torch.equal(after, torch.full((9,), 1.5))
        if error is None:
            assert ((tensor - 1.5).abs() < 0.2).all()
        else:
            assert (tensor == rank).all()
            assert (error.step, error.bucket) == (5, 0)
    error = results[0][1]
    assert error.peers == ((1,) if exchange in (0, 5) else (2,))
    assert f"rank {error.peers[0]} sent" in str(error)
    assert "step 6 instead of 5" in str(error)


@pytest.mark.parametrize("exchange", range(6))
def test_a_rank_that_leaves_in_the_middle(exchange, ranks, recorder):
    def work(transport):
        def leave(number, peer, tensor):
            if transport.rank == 3 and number == exchange:
                transport.close()

        tensor = torch.full((1000,), float(transport.rank))
        arguments = {"transport": recorder(transport, leave), "codec": DynamiQ(), "schedule": "hierarchical:2"}
        try:
            all_reduce(tensor, check=False, step=8, bucket=3, **arguments)
        except CommunicationError as error:
            transport.abort()
            return tensor, error
        return tensor, None

    failed = {4: {2, 3}, 5: set()}.get(exchange, {0, 1, 2, 3})  # in the end only its own node waits for it
    for rank, (tensor, error) in enumerate(ranks(4, work)):
        if rank in failed:
            assert (tensor == rank).all()
            assert (error.step, error.bucket) == (8, 3)
            assert rank == 3 or error.peers
            assert set(error.peers) <= {0, 1, 2, 3} - {rank}
        else:
            assert error is None
            assert ((tensor - 1.5).abs() < 0.2).all()


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (hierarchical(3), "node_size cannot be 3 with 4 ranks; allowed: 1, 2, 4"),
        (hierarchical(5), "node_size cannot be 5 with 4 ranks; allowed: 1, 2, 4"),
        ("hierarchical:3", "node_size cannot be 3 with 4 ranks"),
        (hierarchical(0), "node_size cannot be 0; allowed: an integer of at least 1"),
        (hierarchical(-2), "node_size cannot be -2"),
        (hierarchical(2.0), r"node_size cannot be 2\.0"),
        (hierarchical(True), "node_size cannot be True"),
        ("hierarchical:two", "node_size cannot be 'two'"),
        ("hierarchical:", "node_size cannot be ''"),
        ("hierarchical", "schedule cannot be 'hierarchical'; allowed: ring"),
        ("hierarchical:2:star", "schedule cannot be 'star'"),
        ("hierarchical:2:ring:ring", "schedule cannot be 'hierarchical:2:ring:ring'"),
        (hierarchical(2, between=None), "schedule cannot be None"),
    ],
)
def test_nodes_that_cannot_be_are_refused_on_every_rank(schedule, complaint, ranks):
    def work(transport):
        tensor = torch.full((50,), float(transport.rank))
        with pytest.raises(ConfigError, match=complaint):
            all_reduce(tensor, transport=transport, codec=BF16(), schedule=schedule)
        assert (tensor == transport.rank).all()
        return True

    assert ranks(4, work) == [True] * 4
    if "with 4 ranks" not in complaint:  # what does not hang on their number is refused when the state is made
        with pytest.raises(ConfigError, match=complaint):
            DynamiQState(schedule=schedule)


def test_ranks_with_different_nodes_disagree(ranks):
    schedules = ["hierarchical:2", hierarchical(2), hierarchical(4), hierarchical(2, between="butterfly")]

    def work(transport):
        with pytest.raises(ConfigMismatchError) as caught:
            all_reduce(torch.ones(5), transport=transport, codec=BF16(), schedule=schedules[transport.rank % 4])
        return caught.value.differences

    held = ranks(8, work)[0]["schedule"]
    assert held[0] == held[1] == held[4]
    assert len(set(held)) == 3
    assert "nodes of 4, between them ring" in held[2]


def test_as_text_and_in_a_pickled_state():
    schedule = hierarchical(8, between="butterfly")
    assert find_route(schedule, 3, 16) == find_route("hierarchical:8:butterfly", 3, 16)
    assert find_route(hierarchical(8), 3, 16) == find_route("hierarchical:8", 3, 16)
    state = pickle.loads(pickle.dumps(DynamiQState(schedule=schedule)))
    assert "hierarchical(8, between='butterfly')" in repr(state)


def test_a_state_averages_over_nodes(ranks, random_rows, same_bits):
    """Compressed, too small to be compressed, of a dtype that is not compressed; with a measurement in step 0."""
    rows = [random_rows(4, 5000), random_rows(4, 100), random_rows(4, 6000, dtype=torch.float64)]
    groups = [LocalTransport.group(4) for _ in range(2)]

    def work(outer):
        mine = iter(groups)
        state = DynamiQState(
            schedule=hierarchical(2),
            backend="reference",
            transport=lambda: next(mine)[outer.rank],
            lanes=2,
            min_compress_numel=1000,
            measure_every=2,
        )
        steps = []
        for _ in range(2):
            futures = [state.begin(row[outer.rank].clone(), index=index) for index, row in enumerate(rows)]
            steps.append([future.wait() for future in futures])
        stats = state.stats()
        state.close()
        return steps, stats

    for steps, stats in ranks(4, work):
        for step, (compressed, small, wide) in enumerate(steps):
            assert same_bits(compressed, simulate(rows[0], codec=DynamiQ(), schedule="hierarchical:2", step=step).mean)
            assert torch.allclose(small, rows[1].mean(dim=0), rtol=0, atol=1e-6)
            assert torch.allclose(wide, rows[2].mean(dim=0), rtol=0, atol=1e-15)
        assert stats.bytes_node > 0
        assert stats.measured_vnmse == pytest.approx(stats.predicted_vnmse, rel=0.3)
        assert sum(stats.widths.values()) == pytest.approx(1.0)
        assert stats.seconds_node > 0


@pytest.mark.parametrize("every", [0, 2])
def test_bits_between_nodes_are_those_of_the_budget(every, ranks, random_rows):
    rows = random_rows(4, 50_000)
    group = LocalTransport.group(4)

    def work(outer):
        state = DynamiQState(
            bits=4.0,
            schedule=hierarchical(2),
            backend="reference",
            transport=lambda: group[outer.rank],
            lanes=1,
            measure_every=every,
        )
        for _ in range(3):
            state.begin(rows[outer.rank].clone(), index=0).wait()
        stats = state.stats()
        state.close()
        return stats

    for stats in ranks(4, work):
        assert 3.9 < stats.bits_between_nodes <= 4.0
        assert (stats.bytes_measurement > 0) == bool(every)
        assert stats.bits_per_coordinate == pytest.approx(8 * stats.bytes_sent / stats.coordinates)
        own = 8 * (stats.bytes_sent - stats.bytes_measurement) / stats.coordinates
        assert own == pytest.approx((2 * 32 + 4.0) / 3, rel=0.01)  # 32 bits for two moves of three


def test_the_hook_averages_over_nodes(ddp_ranks):
    def work(group):
        model = torch.nn.Linear(40, 200, bias=False)
        torch.nn.init.ones_(model.weight)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(DynamiQState(codec=BF16(), schedule="hierarchical:2", process_group=group), dynamiq_hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 40), group.rank() + 1.0)).sum().backward()
        return float(model.weight.grad.min()), float(model.weight.grad.max())

    assert ddp_ranks(4, work) == [(2.5, 2.5)] * 4
