"""The hook as DDP calls it: the contract, the error paths, and that it computes what no hook computes."""

import copy
import gc
import inspect
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import BackendError, DynamiQ, DynamiQError, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, ConfigMismatchError, DynamiQState, dynamiq_hook

SCHEDULES = ("ring", "butterfly")


def single(value=0.0, dtype=torch.float32):
    """A model of one weight, whose gradient is its input."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def layers(count=4, width=24):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    generator = torch.Generator().manual_seed(0)  # the global one is shared by the ranks' threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return model


def wrap(model, group, *, hook=dynamiq_hook, cap=None, ddp=None, **arguments):
    settings = {"codec": BF16(), "min_compress_numel": 0, "process_group": group, **arguments}
    state = DynamiQState(**settings)
    options = {**({} if cap is None else {"bucket_cap_mb": cap}), **(ddp or {})}
    ddp = DistributedDataParallel(model, process_group=group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(ddp, value):
    ddp.zero_grad()
    width = next(ddp.parameters()).shape[-1]
    ddp(torch.full((2, width), float(value), dtype=next(ddp.parameters()).dtype)).sum().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def gradients_of(models, values):
    """The exact mean of what each rank computes by itself."""
    every = []
    for model, value in zip(models, values, strict=True):
        model.zero_grad()
        model(torch.full((2, model[0].weight.shape[1]), float(value))).sum().backward()
        every.append([p.grad.clone() for p in model.parameters()])
    return [torch.stack(parts).double().mean(dim=0) for parts in zip(*every, strict=True)]


def assert_close(found, exact, relative=0.02):
    found, exact = (torch.cat([part.double().flatten() for part in parts]) for parts in (found, exact))
    assert float((found - exact).norm()) <= relative * float(exact.norm())


def test_annotations_are_what_ddp_compares_them_with():
    signature = inspect.signature(dynamiq_hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert dynamiq_hook.__name__ == "dynamiq_hook"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_the_mean_and_equal_on_all_ranks(size, schedule, codec, ddp_ranks):
    def work(group):
        ddp, _ = wrap(layers(), group, codec=codec, schedule=schedule, cap=0.003)
        return [backward(ddp, group.rank() + 1) for _ in range(2)]

    results = ddp_ranks(size, work)
    exact = gradients_of([layers() for _ in range(size)], range(1, size + 1))
    for steps in results:
        for step, found in enumerate(steps):
            assert_close(found, exact, 0.2 if isinstance(codec, DynamiQ) else 0.02)
            assert all(torch.equal(a, b) for a, b in zip(found, results[0][step], strict=True))


class Branches(nn.Module):
    """Of three weights, the first is used on all ranks, the second on rank 0 only, and the third in the first step."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.step = rank, 0
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(300)) for _ in range(3)])

    def forward(self, x):
        everywhere, first_rank, first_step = self.weights
        self.step += 1
        total = (everywhere * x).sum()
        total = total + first_rank.sum() * 8 if self.rank == 0 else total
        return total + first_step.sum() * x[0] if self.step == 1 else total


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_what_no_rank_has_used_keeps_its_place_under_momentum(size, schedule, feedback, as_view, ddp_ranks):
    """Not even what error feedback still owes it may turn its missing gradient into one."""

    def train(group, codec):
        model = Branches(group.rank())
        ddp = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=as_view
        )
        if codec is not None:
            settings = {"process_group": group, "min_compress_numel": 0, "error_feedback": feedback}
            ddp.register_comm_hook(DynamiQState(schedule=schedule, **settings), dynamiq_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
        kept = []
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            ddp(torch.linspace(1.0, 2.0, 300) * (1 + group.rank())).backward()
            optimizer.step()
            kept.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
        return kept, [p.detach().clone() for p in ddp.parameters()]

    plain, _ = ddp_ranks(size, lambda group: train(group, None))[0]
    results = ddp_ranks(size, lambda group: train(group, "dynamiq"))
    for kept, parameters in results:
        assert [[g is None for g in step] for step in kept] == [[False] * 3] + [[False, False, True]] * 3
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][1], strict=True))
        assert torch.equal(parameters[2], -0.125 * kept[0][2])  # moved by its only gradient, and never again
        for step, (found, exact) in enumerate(zip(kept, plain, strict=True)):
            pairs = [(a, b) for a, b in zip(found, exact, strict=True) if b is not None]
            assert len(pairs) == (3 if step == 0 else 2)
            assert_close(*zip(*pairs, strict=True), 0.2)


def test_averages_once_like_no_hook(ddp_ranks):
    def work(group):
        ddp, _ = wrap(single(), group)
        plain = DistributedDataParallel(single(), process_group=group)
        value = 1.0 + 2 * group.rank()
        return [float(backward(model, value / 2)[0]) for model in (ddp, plain)]

    assert ddp_ranks(2, work) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_elements_than_ranks(schedule, codec, ddp_ranks):
    """Most chunks are empty, which no later message may suffer from."""

    def work(group):
        ddp, _ = wrap(single(), group, codec=codec, schedule=schedule)
        return [float(backward(ddp, (group.rank() + 1) * scale / 2)[0]) for scale in (1, 2, 4)]

    results = ddp_ranks(4, work)
    assert results == [results[0]] * 4
    assert results[0] == pytest.approx([2.5, 5.0, 10.0], rel=0.3 if isinstance(codec, DynamiQ) else 1e-6)


def test_one_rank_sends_nothing(ddp_ranks):
    def work(group):
        ddp, state = wrap(layers(), group)
        found = backward(ddp, 1)
        assert state.stats().bytes_sent == 0
        assert state.stats().bits_per_coordinate == 0
        return found

    (found,) = ddp_ranks(1, work)
    assert all(torch.equal(a, b.float()) for a, b in zip(found, gradients_of([layers()], [1]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_bucket_is_kept(dtype, ddp_ranks):
    def work(group):
        ddp, _ = wrap(single(dtype=dtype), group)
        (found,) = backward(ddp, (1.0 + 2 * group.rank()) / 2)
        return found.dtype, float(found)

    assert ddp_ranks(2, work) == [(dtype, 2.0)] * 2


def test_parameters_of_several_dtypes(ddp_ranks):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes])

        def forward(self, x):
            return sum((torch.view_as_real(w) if w.is_complex() else w).double().sum() * x for w in self.weights)

    def work(group):
        ddp, _ = wrap(Mixed(), group)
        ddp(torch.tensor(1.0 + group.rank(), dtype=torch.float64) / 3).backward()
        return [p.grad for p in ddp.parameters()]

    for found in ddp_ranks(2, work):
        assert torch.equal(found[0], torch.full((5,), 0.5))
        assert torch.equal(found[1], torch.full((5,), 0.5, dtype=torch.bfloat16))
        exact = (torch.tensor(1.0, dtype=torch.float64) / 3 + torch.tensor(2.0, dtype=torch.float64) / 3) / 2
        assert torch.equal(found[2], exact.expand(5))
        assert torch.allclose(found[3], torch.full((5,), complex(0.5, 0.5)))


def test_half_precision_sum_does_not_overflow(ddp_ranks):
    def work(group):
        results = []
        for threshold in (0, 10):  # compressed, and not
            ddp, _ = wrap(single(dtype=torch.float16), group, min_compress_numel=threshold)
            results.append(float(backward(ddp, 30000.0)[0]))
        return results

    for compressed, exact in ddp_ranks(2, work):
        assert compressed == pytest.approx(60000, rel=0.01)
        assert exact == 60000


def test_small_buckets_are_averaged_exactly(ddp_ranks):
    value = 0.123456789

    def work(group):
        ddp, state = wrap(single(), group, min_compress_numel=2)
        return float(backward(ddp, value / 2)[0]), state.stats().bytes_sent

    for found, sent in ddp_ranks(2, work):
        assert found == float(torch.tensor(value))
        assert sent > 0


def test_warm_up_steps_are_exact(ddp_ranks):
    value = float(torch.tensor(1.0) + 2.0**-20)  # more than bfloat16 holds

    def work(group):
        ddp, _ = wrap(single(), group, warmup_steps=2)
        return [float(backward(ddp, value / 2)[0]) for _ in range(3)]

    assert ddp_ranks(2, work) == [[value, value, 1.0]] * 2


def test_the_users_collectives_are_left_alone(ddp_ranks):
    """One is pending on the group during the whole backward pass, and another is done inside the forward pass."""
    value = torch.tensor(0.123456789)

    class Summing(nn.Module):
        def __init__(self, group):
            super().__init__()
            self.inner, self.group = layers(2), group

        def forward(self, x):
            self.seen = value.clone()
            self.group.allreduce([self.seen]).wait()
            return self.inner(x)

    def work(group):
        model = Summing(group)
        ddp, _ = wrap(model, group, cap=0.001)
        other = 1 - group.rank()
        for number in range(3):
            pending = torch.full((50_000,), 0.123456789)
            later = group.allreduce([pending])
            # Of the size and the tag of what the ranks compare at first.
            letter = torch.full((16,), 99, dtype=torch.uint8)
            arriving = group.recv([letter], other, 16)
            x = torch.full((2, 24), float(group.rank() + 1))
            ddp.zero_grad()
            ddp(x).sum().backward()
            group.send([torch.full((16,), number, dtype=torch.uint8)], other, 16).wait()
            arriving.wait()
            later.wait()
            assert (letter == number).all()
            assert torch.equal(model.seen, value + value)
            assert torch.equal(pending, torch.full((50_000,), 0.123456789) * 2)
        return [p.grad.clone() for p in ddp.parameters()]

    for found in ddp_ranks(2, work):
        assert_close(found, gradients_of([layers(2), layers(2)], [1, 2]))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_do_not_change_the_result(lanes, ddp_ranks):
    def work(group):
        ddp, _ = wrap(layers(6), group, codec=DynamiQ(), lanes=lanes, cap=0.003)
        return [backward(ddp, group.rank() + 1) for _ in range(3)][-1]

    found = ddp_ranks(2, work)[0]
    assert_close(found, gradients_of([layers(6), layers(6)], [1, 2]), 0.1)
    reference = test_lanes_do_not_change_the_result.__dict__.setdefault("found", found)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def test_the_hook_returns_while_other_ranks_are_late(ddp_ranks):
    """Gradients of all layers are handed over before the other rank has begun: nothing waits but the end."""
    handed_over = threading.Event()
    last = 2  # before, DDP itself meets once to rebuild its buckets

    def work(group):
        ddp, _ = wrap(layers(), group, cap=0.003, timeout=20.0)
        for step in range(last + 1):
            x = torch.ones(2, 24, requires_grad=True)
            if step == last and group.rank() == 0:
                x.register_hook(lambda grad: handed_over.set())  # the gradient that backward computes last
            if step == last and group.rank() == 1:
                assert handed_over.wait(10)
            ddp(x).sum().backward()
        return True

    assert ddp_ranks(2, work) == [True, True]


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("hook", [dynamiq_hook, fp16_compress_wrapper(dynamiq_hook)], ids=["alone", "wrapped"])
def test_gradients_are_final_when_backward_returns(hook, as_view, ddp_ranks):
    class Slow(BF16):
        def decompress(self, message, plan, *, chunk, slot, out):
            time.sleep(0.02)
            return super().decompress(message, plan, chunk=chunk, slot=slot, out=out)

    def work(group):
        ddp, _ = wrap(layers(), group, hook=hook, codec=Slow(), cap=0.003, ddp={"gradient_as_bucket_view": as_view})
        found = backward(ddp, group.rank() + 1)
        return found, [p.grad for p in ddp.parameters()]

    for early, later in ddp_ranks(2, work):
        assert all(torch.equal(a, b) for a, b in zip(early, later, strict=True))
        assert_close(early, gradients_of([layers(), layers()], [1, 2]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_composes_with_the_fp16_wrapper(size, schedule, codec, ddp_ranks, tolerance):
    """Sums are beyond float16 and the mean is not; the hook sees float16, and training sees float32."""
    rows = torch.full((size, 600), 60000.0)
    rows[:, ::2] = torch.arange(1.0, size + 1)[:, None]

    def work(group):
        model = nn.Linear(600, 1, bias=False)
        wrapped = fp16_compress_wrapper(dynamiq_hook)
        ddp, _ = wrap(model, group, hook=wrapped, codec=codec, schedule=schedule)
        for _ in range(2):
            ddp.zero_grad()
            ddp(rows[group.rank()]).sum().backward()
        return model.weight.grad.flatten()

    results = ddp_ranks(size, work)
    for found in results:
        assert found.dtype == torch.float32
        assert torch.equal(found, results[0])
        assert torch.equal(found, found.half().float())  # it has been float16
        assert float((found.double() - rows.double().mean(dim=0)).norm()) <= tolerance(codec, rows.half(), schedule)


def test_other_arguments_are_refused_at_once():
    state = DynamiQState()
    with pytest.raises(InputError, match=r"cannot average a Tensor; allowed: a bucket of Distri.*FSDP"):
        dynamiq_hook(state, torch.ones(3))
    # What FSDP hands to hooks of sharded gradients, whatever the state: the gradient, and where a part of it goes.
    for other in (state, None):
        with pytest.raises(InputError, match=r"a Tensor with Tensor; allowed: a bucket of Distri.*FSDP"):
            dynamiq_hook(other, torch.ones(4), torch.empty(2))


def test_a_state_that_is_none_is_an_error_in_the_training_loop(ddp_ranks):
    def work(group):
        ddp = DistributedDataParallel(single(), process_group=group)
        ddp.register_comm_hook(None, dynamiq_hook)
        with pytest.raises(InputError, match="cannot be a NoneType; allowed: a DynamiQState"):
            backward(ddp, 1)
        return True

    assert ddp_ranks(2, work) == [True] * 2


def test_a_hook_belongs_to_one_model(ddp_ranks):
    def work(group):
        ddp, state = wrap(single(), group)
        with pytest.raises(RuntimeError, match="register_comm_hook"):
            ddp.register_comm_hook(state, dynamiq_hook)
        return True

    assert ddp_ranks(1, work) == [True]


class Failing(BF16):
    """Fails at one encoding on one rank."""

    def __init__(self, rank, at, error=InputError):
        self.rank, self.at, self.error, self.count = rank, at, error, 0

    def decompress_accumulate_recompress(self, received, x, plan, *, chunk, slot, out=None):
        self.count += slot == self.rank
        if slot == self.rank and self.count == self.at:
            raise self.error("the codec met something odd")
        return super().decompress_accumulate_recompress(received, x, plan, chunk=chunk, slot=slot, out=out)


def errors_of_two_steps(ddp_ranks, codec, **settings):
    def work(group):
        ddp, _ = wrap(layers(), group, codec=codec(), cap=0.003, timeout=60, **settings)

        def two_steps():
            for _ in range(2):
                backward(ddp, 1)

        with pytest.raises((DynamiQError, ArithmeticError, MemoryError, RuntimeError)) as caught:
            two_steps()
        # A rank that fails leaves, so that nobody waits for long; 1 ms is for what is there or not.
        assert not re.search(r"imed out waiting \d{4,}ms", str(caught.value))
        return caught.value

    return ddp_ranks(3, work)


@pytest.mark.parametrize(
    ("schedule", "at"), [("ring", 1), ("ring", 3), ("ring", 8), ("butterfly", 1), ("butterfly", 5)]
)
def test_an_error_inside_surfaces_as_itself_on_the_rank_and_as_a_lost_peer_on_the_others(at, schedule, ddp_ranks):
    errors = errors_of_two_steps(ddp_ranks, lambda: Failing(1, at), schedule=schedule)
    assert isinstance(errors[1], InputError)
    assert "the codec met something odd" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], CommunicationError)
        assert f"step {errors[rank].step}, bucket {errors[rank].bucket}" in str(errors[rank])


def test_an_error_inside_is_named_with_a_static_graph(ddp_ranks):
    """In its first backward pass DDP itself looks at the buckets before anybody else can, and quotes their errors."""
    first = errors_of_two_steps(ddp_ranks, lambda: Failing(1, 1), ddp={"static_graph": True})
    assert [type(error) for error in first] == [RuntimeError] * 3
    assert "InputError: the codec met something odd" in str(first[1])
    assert all("CommunicationError: all-reduce of step 0, bucket 0: rank" in str(first[rank]) for rank in (0, 2))
    later = errors_of_two_steps(ddp_ranks, lambda: Failing(1, 5), ddp={"static_graph": True})
    assert [type(error) for error in later] == [CommunicationError, InputError, CommunicationError]
    assert [error.step for error in (later[0], later[2])] == [1, 1]


@pytest.mark.parametrize("error", [ArithmeticError, MemoryError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_the_work_on_a_bucket_is_raised_and_nobody_hangs(error, ddp_ranks):
    """An exit in a thread that is not the main one ends that thread, and nobody would be told."""
    errors = errors_of_two_steps(ddp_ranks, lambda: Failing(1, 2, error))
    if issubclass(error, Exception):
        assert type(errors[1]) is error
    else:
        assert type(errors[1]) is RuntimeError
        assert error.__name__ in str(errors[1])
    assert "the codec met something odd" in str(errors[1])
    assert [type(errors[rank]) for rank in (0, 2)] == [CommunicationError] * 2


@pytest.mark.parametrize(
    ("difference", "name"),
    [
        ({"codec": DynamiQ()}, "codec"),
        ({"schedule": "butterfly"}, "schedule"),
        ({"min_compress_numel": 10**6}, "codec"),
        ({"lanes": 1}, "lanes"),
        ({"warmup_steps": 1}, "codec"),
    ],
)
def test_states_that_differ_are_named_on_every_rank(difference, name, ddp_ranks):
    def work(group):
        ddp, _ = wrap(layers(), group, **(difference if group.rank() == 2 else {}))
        with pytest.raises(ConfigMismatchError) as caught:
            backward(ddp, 1)
        return caught.value

    errors = ddp_ranks(3, work)
    for error in errors:
        assert name in error.differences
        assert "on rank 2" in str(error)


def test_a_rank_that_cannot_make_its_codec_tells_the_others(ddp_ranks):
    def work(group):
        settings = {"codec": None, "backend": "abacus"} if group.rank() == 0 else {}
        ddp, _ = wrap(layers(), group, **settings)
        with pytest.raises(ConfigMismatchError, match="abacus"):
            backward(ddp, 1)
        everywhere, _ = wrap(layers(), group, codec=None, backend="abacus")
        with pytest.raises(BackendError, match="abacus"):
            backward(everywhere, 1)
        return True

    assert ddp_ranks(2, work) == [True, True]


def test_after_a_failure_every_step_fails_until_the_state_is_closed(ddp_ranks):
    def work(group):
        ddp, state = wrap(layers(), group, codec=Failing(0, 2), timeout=20)
        with pytest.raises(DynamiQError):
            backward(ddp, 1)
        again, third = (DistributedDataParallel(layers(), process_group=group) for _ in range(2))
        again.register_comm_hook(state, dynamiq_hook)
        with pytest.raises(DynamiQError):
            backward(again, 1)
        state.close()
        third.register_comm_hook(state, dynamiq_hook)
        return backward(third, group.rank() + 1)

    for found in ddp_ranks(2, work):
        assert_close(found, gradients_of([layers(), layers()], [1, 2]))


def test_no_thread_is_left_behind(ddp_ranks):
    def lanes():
        return {thread for thread in threading.enumerate() if thread.name == "dynamiq lane"}

    before = lanes()  # of earlier tests, which may still be ending

    def work(group):
        ddp, state = wrap(layers(), group, cap=0.003)
        backward(ddp, 1)
        assert lanes() - before
        state.close()
        state.close()
        other, _ = wrap(layers(), group)
        backward(other, 1)
        return True

    ddp_ranks(2, work)
    deadline = time.monotonic() + 20
    while (left := lanes() - before) and time.monotonic() < deadline:
        gc.collect()  # the second state was never closed; its lanes end when it is collected
        time.sleep(0.01)
    assert not left


def test_a_state_that_is_in_use_can_be_copied(ddp_ranks):
    def work(group):
        ddp, state = wrap(single(), group)
        backward(ddp, 1)
        with pytest.warns(UserWarning, match="process_group is not kept"):
            twin = copy.deepcopy(state)
        assert twin.steps == state.steps == 1
        return True

    assert ddp_ranks(1, work) == [True]
