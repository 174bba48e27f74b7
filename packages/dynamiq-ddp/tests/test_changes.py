"""Settings that change between steps: on all ranks they take effect together; on some, all ranks raise at once."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import DynamiQ, DynamiQError, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, ConfigMismatchError, DynamiQState, dynamiq_hook, simulate
from dynamiq_ddp.tokens import ComparingTransport
from dynamiq_transport import Transport, TransportError

PROMPT = 20.0
"""Seconds within which every rank must know; the timeout is six times as long."""


def step(state, tensors, parameters=((),) * 9):
    futures = [state.begin(x, index=i, parameters=parameters[i]) for i, x in enumerate(tensors)]
    return [future.wait() for future in futures]


def failure(state, tensors, parameters=((),) * 9):
    """The error that a step ends with, as the state keeps it."""
    with pytest.raises(RuntimeError):
        step(state, tensors, parameters)
    with pytest.raises(DynamiQError) as caught:
        state.begin(tensors[0], index=0, parameters=parameters[0])
    return caught.value


CHANGES = {
    "fewer bits": lambda state: setattr(state, "bits", 4.0),
    "exempt": lambda state: setattr(state, "exempt", lambda parameter: parameter.dim() <= 1),
    "exempt nothing": lambda state: setattr(state, "exempt", []),
    "step": lambda state: state.load_state_dict({**state.state_dict(), "steps": 7}),
}


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_is_an_error_on_all_well_before_the_timeout(change, schedule, states):
    parameters = [[nn.Parameter(torch.zeros(100, 49)), nn.Parameter(torch.zeros(100))] for _ in range(3)]

    for n, odd in ((2, 1), (3, 0), (4, 2)):

        def work(state, rank, odd=odd):
            step(state, [torch.ones(5000) for _ in parameters], parameters)
            if rank == odd:
                CHANGES[change](state)
            tensors = [torch.full((5000,), float(rank)) for _ in parameters]
            began = time.monotonic()
            error = failure(state, tensors, parameters)
            assert time.monotonic() - began < PROMPT
            assert all((tensor == rank).all() for tensor in tensors)
            return [error]

        settings = {"codec": None, "backend": "numba", "schedule": schedule, "timeout": 6 * PROMPT}
        for rank, [error] in enumerate(states(n, work, **settings)):
            assert isinstance(error, ConfigMismatchError)
            assert set(error.differences) <= {"codec", "step", "bucket"}
            for held in error.differences.values():
                same = [value == held[rank] for value in held]
                assert same == [(other == odd) == (rank == odd) for other in range(n)]
                assert "something else" not in held[rank]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_exempt_function_that_fails_on_one_rank_is_an_error_on_all(steps_before, states):
    parameters = [[nn.Parameter(torch.zeros(50, 100))]]

    def work(state, rank):
        for _ in range(steps_before):
            step(state, [torch.ones(5000)], parameters)
        if rank == 1:
            state.exempt = lambda parameter: parameter.grad.any()  # there is no gradient
        tensor, began = torch.ones(5000), time.monotonic()
        error = failure(state, [tensor], parameters)
        assert time.monotonic() - began < PROMPT
        assert (tensor == 1).all()
        return str(error)

    texts = states(3, work, timeout=6 * PROMPT)
    assert "'NoneType' object has no attribute 'any'" in texts[1]
    assert all("problem: " in text and "on rank 1" in text for text in (texts[0], texts[2]))


def test_a_change_on_one_rank_over_gloo_is_raised_as_itself(ddp_ranks):
    """What a training loop sees: the typed error, out of backward, on every rank."""

    def work(group):
        model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
        state = DynamiQState(process_group=group, min_compress_numel=0, timeout=6 * PROMPT)
        ddp.register_comm_hook(state, dynamiq_hook)
        for number in range(4):
            if number == 3 and group.rank() == 1:
                state.bits = 3.0
                with pytest.raises(
                    ConfigMismatchError, match=r"codec: something else .* on ranks 0, 2; .*bits=3\.0.* on rank 1"
                ):
                    ddp(torch.ones(2, 48)).sum().backward()
            elif number == 3:
                began = time.monotonic()
                with pytest.raises(ConfigMismatchError, match=r"codec: .*bits=5\.0.* on ranks 0, 2"):
                    ddp(torch.ones(2, 48)).sum().backward()
                assert time.monotonic() - began < PROMPT
            else:
                ddp(torch.ones(2, 48)).sum().backward()
        state.close()
        again = DistributedDataParallel(nn.Linear(48, 48), process_group=group)
        state.bits = 4.0
        again.register_comm_hook(state, dynamiq_hook)
        again(torch.ones(2, 48)).sum().backward()
        return again.module.weight.grad

    found = ddp_ranks(3, work)
    assert all(torch.equal(grad, found[0]) for grad in found)


def test_a_rank_with_a_problem_of_its_own_tells_the_others(states):
    parameters = [[nn.Parameter(torch.zeros(5000))]]

    def work(state, rank):
        step(state, [torch.ones(5000)], parameters)
        if rank == 2:
            state.exempt = list(parameters[0])
            return [failure(state, [torch.ones(5000)])]  # without parameters nobody can tell
        return [failure(state, [torch.ones(5000)], parameters)]

    told = [error for [error] in states(3, work, timeout=6 * PROMPT)]
    assert all(isinstance(error, ConfigMismatchError) for error in told)
    assert [list(error.differences) for error in told] == [["problem"]] * 3
    for error, words in zip(told, ["an error of its own", "an error of its own", "a bucket of 5000"], strict=True):
        assert [held.startswith(words) for held in error.differences["problem"]] == [False, False, True]
        assert str(error).endswith(" on rank 2")

    def all_alike(state, rank):
        step(state, [torch.ones(5000)], parameters)
        state.exempt = list(parameters[0])
        return [failure(state, [torch.ones(5000)])]

    assert all(isinstance(error, InputError) for [error] in states(3, all_alike))


def test_a_problem_that_the_others_cannot_be_told_is_raised_as_itself(states):
    """In a bucket that they do not compare, since nothing has changed there, they only see that this rank is gone."""
    parameters = [[nn.Parameter(torch.zeros(5000))] for _ in range(2)]

    def work(state, rank):
        state.exempt = [torch.zeros(5000)]
        step(state, [torch.ones(5000) for _ in parameters], parameters)
        given = [parameters[0], ()] if rank == 2 else parameters
        return [failure(state, [torch.ones(5000) for _ in parameters], given)]

    found = [type(error) for [error] in states(3, work, timeout=6 * PROMPT)]
    assert found == [CommunicationError, CommunicationError, InputError]


def test_such_a_problem_is_known_everywhere_well_before_the_timeout_over_gloo(ddp_ranks):
    """The rank that has it does not wait for a comparison that the others do not make."""
    parameters = [[nn.Parameter(torch.zeros(5000))] for _ in range(3)]

    def work(group):
        state = DynamiQState(
            codec=BF16(),
            process_group=group,
            min_compress_numel=0,
            timeout=6 * PROMPT,
            exempt=[torch.zeros(5000)],
        )
        step(state, [torch.ones(5000) for _ in parameters], parameters)
        given = [parameters[0], (), parameters[2]] if group.rank() == 2 else parameters
        tensors, began = [torch.ones(5000) for _ in parameters], time.monotonic()
        error = failure(state, tensors, given)
        assert time.monotonic() - began < PROMPT
        state.close()
        return error

    first, second, own = ddp_ranks(3, work)
    assert isinstance(own, InputError)
    assert "a bucket of 5000 coordinates" in str(own)
    for error in (first, second):
        assert isinstance(error, CommunicationError)
        assert error.step == 1
        assert error.bucket in (1, 2)  # the third one is on the lane that the first bucket has left free
        assert error.peers


def test_changes_on_all_ranks_take_effect_in_the_next_step(states, random_rows, same_bits):
    """Not in the middle of one: the second bucket of a step is like its first."""
    rows = random_rows(3, 5000)

    def work(state, rank):
        found = [step(state, [rows[rank].clone(), rows[rank].clone()])]
        for bits in (3.0, 3.0, 7.5):
            first = state.begin(rows[rank].clone(), index=0)
            state.bits = bits
            found.append([first.wait(), state.begin(rows[rank].clone(), index=1).wait()])
        return found

    used = [5.0, 5.0, 3.0, 3.0]
    for found in states(3, work, codec=None, backend="reference"):
        for number, (bits, means) in enumerate(zip(used, found, strict=True)):
            codec = DynamiQ(DynamiQState(bits=bits)._settings.config)
            expected = [simulate(rows, codec=codec, step=number, bucket=bucket).mean for bucket in range(2)]
            assert all(same_bits(a, b) for a, b in zip(means, expected, strict=True))


def test_tokens_travel_with_the_first_messages_and_not_before_them(ranks):
    """No exchange is waited for that was not there before; what the steady state costs is 8 bytes to every rank."""

    def work(transport):
        events = []

        class Noting(ComparingTransport):
            """Notes when it is asked to post, and to wait for what."""

            def __init__(self):
                self.rank, self.size, self.number = transport.rank, transport.size, 0

            def exchange(self, sends, recvs):
                number, self.number = self.number, self.number + 1
                events.append(("post", number, [tensor.numel() for _, tensor in sends]))
                handle = transport.exchange(sends, recvs)
                wait = handle.wait
                handle.wait = lambda: (events.append(("wait", number)), wait())
                return handle

            def close(self):
                pass

        noting = Noting()
        state = DynamiQState(codec=BF16(), min_compress_numel=0, lanes=1, transport=lambda: noting)
        step(state, [torch.ones(1000)])
        events.clear()
        noting.number = 0
        step(state, [torch.ones(1000)])
        state.close()
        return events

    size, n = 2 * 250 + 16, 4
    for events in ranks(n, work):
        assert events[0] == ("post", 0, [8] * (n - 1))
        assert events[1] == ("post", 1, [size])
        assert events[2:4] == [("wait", 0), ("wait", 1)]
        assert events[4:] == [event for k in range(2, 2 * (n - 1) + 1) for event in (("post", k, [size]), ("wait", k))]


@pytest.mark.parametrize("refused", [1, 2], ids=["first messages", "receives posted ahead"])
def test_a_peer_that_is_gone_because_of_the_tokens_is_no_lost_peer(ranks, refused):
    """Rank 0 is slow: the others have compared and left before it posts its messages, which is refused then."""

    class Late(Transport):
        """Posts a batch behind the tokens when the others have left, as a transport that notices this at once."""

        def __init__(self, transport):
            self.rank, self.size, self.posted = transport.rank, transport.size, 0
            self._transport = transport

        def exchange(self, sends, recvs):
            self.posted += 1
            if self.posted <= refused:
                return self._transport.exchange(sends, recvs)
            raise TransportError("rank 1 has closed", (1,))

        def close(self):
            self._transport.close()

    def work(transport):
        late = Late(transport) if transport.rank == 0 else transport
        comparing = ComparingTransport(late, {"codec": str(transport.rank == 1)}, lambda sent: None, lambda: None)
        message = torch.empty(100, dtype=torch.uint8)
        other = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        try:
            first = comparing.exchange([(other[0], message)], [(other[1], message.clone())])
            ahead = comparing.exchange([], [(other[1], message.clone())])
            first.wait()
            ahead.wait()
        finally:
            transport.abort()

    for error in ranks(3, work, timeout=6 * PROMPT):
        assert isinstance(error, ConfigMismatchError)
        assert list(error.differences) == ["codec"]


def test_messages_behind_tokens_that_differ_are_never_waited_for(ranks):
    """Even if they are of sizes that nobody expects."""

    def work(transport):
        facts = {"codec": "a" if transport.rank else "b", "same": 1}
        comparing = ComparingTransport(transport, facts, lambda sent: None, lambda: None)
        size = 100 + transport.rank
        to, source = (transport.rank + 1) % 4, (transport.rank - 1) % 4
        handle = comparing.exchange([(to, torch.empty(size, dtype=torch.uint8))], [(source, torch.empty(size).byte())])
        with pytest.raises(ConfigMismatchError) as caught:
            handle.wait()
        transport.abort()  # as a lane does; to close would wait for the messages
        return caught.value.differences

    for rank, differences in enumerate(ranks(4, work, timeout=6 * PROMPT)):
        assert list(differences) == ["codec"]
        assert [held in "ab" for held in differences["codec"]] == [(other == 0) == (rank == 0) for other in range(4)]
