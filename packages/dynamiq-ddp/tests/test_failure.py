"""What happens when a peer goes away or sends what does not belong: an error that says so, and no changed tensor."""

import threading

import pytest
import torch

from dynamiq_core import DynamiQ, DynamiQError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, all_reduce
from dynamiq_ddp.bucket import Way, averaging
from dynamiq_ddp.errors import first_cause
from dynamiq_ddp.gate import Gate
from dynamiq_ddp.lanes import Lanes
from dynamiq_ddp.meter import Meter, MeteredTransport
from dynamiq_ddp.route import find_route
from dynamiq_ddp.tokens import ComparingTransport
from dynamiq_transport import LocalTransport, TransportError


def attempt(transport, codec, size=1000, **arguments):
    """The tensor and the error of one all-reduce."""
    tensor = torch.full((size,), float(transport.rank))
    try:
        all_reduce(tensor, transport=transport, codec=codec, **arguments)
    except DynamiQError as error:
        return tensor, error
    return tensor, None


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_rank_that_leaves_in_the_middle(n, schedule, codec, ranks, recorder):
    def work(transport):
        def leave(exchange, peer, tensor):
            if transport.rank == 0 and exchange == (n - 1).bit_length():  # the first after the agreement
                transport.close()

        return attempt(recorder(transport, leave), codec, schedule=schedule, step=8, bucket=3)

    for rank, (tensor, error) in enumerate(ranks(n, work)):
        assert isinstance(error, CommunicationError)
        assert isinstance(error, TransportError)
        assert (error.step, error.bucket) == (8, 3)
        assert "step 8, bucket 3" in str(error)
        assert rank == 0 or error.peers
        assert (tensor == rank).all()


@pytest.mark.parametrize(("n", "exchange"), [(n, e) for n in (2, 3) for e in range(2 + 2 * (n - 1))])
def test_a_damaged_header_is_reported_by_every_rank_that_could_know(n, exchange, ranks, recorder):
    """Without agreement, and with statistics: exchange 0 and 1 are of phase 1, the later ones of the ring."""
    reduce_steps = {0, *range(2, 2 + n - 1)}

    def work(transport):
        def damage(number, peer, tensor):
            if transport.rank == 0 and number == exchange:
                tensor[12] += 1  # the step of the first header

        return attempt(recorder(transport, damage), DynamiQ(), check=False, step=5, bucket=2)

    results = ranks(n, work)
    for rank, (tensor, error) in enumerate(results):
        # What is damaged while reducing spoils the sum, and all learn of it. A finished chunk may be whole elsewhere.
        if exchange in reduce_steps or rank == 0:
            assert isinstance(error, CommunicationError)
            assert error.peers
            assert (error.step, error.bucket) == (5, 2)
            assert (tensor == rank).all()
    text = str(results[0][1])
    assert "step 6 instead of 5" in text
    assert f"rank {n - 1} sent" in text or n > 2


def test_every_rank_stays_in_step_after_a_damaged_header(ranks, recorder):
    def work(transport):
        def damage(number, peer, tensor):
            if transport.rank == 2 and number == 0:
                tensor[0] ^= 255

        recorded = recorder(transport, damage)
        assert attempt(recorded, BF16(), check=False)[1] is not None
        return all_reduce(torch.full((9,), float(transport.rank)), transport=recorded, codec=BF16())

    for result in ranks(4, work):
        assert torch.equal(result, torch.full((9,), 1.5))


def test_ranks_at_different_steps(ranks):
    """Unchecked, messages of the same size: the headers tell."""

    def work(transport):
        return attempt(transport, BF16(), check=False, step=int(transport.rank == 1))

    for rank, (tensor, error) in enumerate(ranks(3, work)):
        assert isinstance(error, CommunicationError)
        assert "step" in str(error)
        assert (tensor == rank).all()


def test_ranks_with_different_sizes_unchecked(ranks):
    def work(transport):
        return attempt(transport, BF16(), size=1000 + 100 * transport.rank, check=False)

    for rank, (tensor, error) in enumerate(ranks(3, work)):
        assert isinstance(error, CommunicationError)
        assert (tensor == rank).all()


def test_a_peer_that_stalls_is_an_error_within_the_timeout(ranks):
    def work(transport):
        return None if transport.rank == 1 else attempt(transport, BF16())

    (tensor, error), _ = ranks(2, work, timeout=0.2)
    assert isinstance(error, CommunicationError)
    assert error.peers == (1,)
    assert not tensor.any()


class Odd(BF16):
    """Fails at one encoding on some ranks."""

    def __init__(self, ranks, at):
        self.ranks, self.at, self.count = ranks, at, 0

    def decompress_accumulate_recompress(self, received, x, plan, *, chunk, slot, out=None):
        self.count += 1
        if slot in self.ranks and self.count == self.at:
            raise ArithmeticError("the codec met something odd")
        return super().decompress_accumulate_recompress(received, x, plan, chunk=chunk, slot=slot, out=out)


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
@pytest.mark.parametrize("failing", [(0, 1, 2, 3), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in step"])
def test_an_error_of_the_codec_ends_the_transport_at_once(ahead, failing, schedule, at, ranks):
    """Whatever was posted ahead: nobody waits for it, neither a peer nor the next call."""
    together = threading.Barrier(4)  # a rank that returned would close its transport and so tell its peers

    def work(transport):
        transport.posts_ahead = ahead
        results = []
        for codec in (Odd(failing, at), BF16()):
            try:
                all_reduce(torch.ones(5000), transport=transport, codec=codec, schedule=schedule, check=False)
            except Exception as error:
                results.append(error)
            together.wait(60.0)
        return results

    for rank, (first, second) in enumerate(ranks(4, work, timeout=20.0)):
        if rank in failing:
            assert isinstance(first, ArithmeticError)
        else:
            assert isinstance(first, CommunicationError)
            assert "has closed" in str(first)
        assert isinstance(second, CommunicationError)
        assert f"the transport of rank {rank} is closed" in str(second)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda transport: MeteredTransport(transport, Meter(), "gradient"),
        lambda transport: ComparingTransport(transport, {}, lambda sent: None, lambda: None),
    ],
    ids=["metered", "comparing"],
)
def test_what_wraps_a_transport_aborts_it_without_finishing_anything(wrap):
    inner, peer = LocalTransport.group(2, timeout=20.0)
    wrapped = wrap(inner)
    wrapped.exchange([], [(1, torch.zeros(8, dtype=torch.uint8))])
    wrapped.abort()
    with pytest.raises(TransportError, match="rank 0 has closed"):
        peer.exchange([(0, torch.zeros(8, dtype=torch.uint8))], []).wait()


class Leaving(BF16):
    """Ends its thread when it is asked for anything."""

    def fingerprint(self):
        raise SystemExit("enough")


@pytest.mark.parametrize("comparison", ["before", "beside"])
def test_an_exit_in_the_first_bucket_lets_no_other_lane_pass(comparison):
    lanes = Lanes([LocalTransport.group(1)[0]])
    gate = Gate(lanes)
    way = Way(Leaving(), find_route("ring", 0, 1), None, None, False, None, "")
    work = averaging(torch.ones(9), way, step=0, bucket=0, comparison=comparison, gate=gate, first=True)
    with pytest.raises(SystemExit):
        work(lanes.lanes[0])
    with pytest.raises(RuntimeError, match="stopped by SystemExit"):
        gate.wait()
    lanes.close()


def test_a_complaint_is_not_hidden_by_what_another_lane_has_lost():
    """A peer that has seen the wrong header too may leave all its lanes before this rank has read its own."""
    complaint = CommunicationError("rank 1 sent a wrong step", (1,), step=3, bucket=0)
    lanes = Lanes([LocalTransport.group(1)[0] for _ in range(2)])
    begun, met = threading.Event(), threading.Event()

    def complain(lane):
        begun.set()
        assert met.wait(30.0)
        raise complaint

    def lose(lane):
        lost = TransportError("rank 0 lost peer 2", (2,))
        raise CommunicationError(str(lost), lost.peers, step=3, bucket=1) from lost

    _, first = lanes.begin(0, complain, torch.ones(3))
    assert begun.wait(30.0)  # after an error, what has not begun is not begun any more
    _, second = lanes.begin(1, lose, torch.ones(3))
    assert second.wait().peers == (2,)
    met.set()
    assert first.wait() is complaint
    assert first_cause([second.error, first.error]) is complaint
    with pytest.raises(CommunicationError, match="wrong step"):
        lanes.begin(2, complain, torch.ones(3))
    lanes.close()
