"""Error feedback: what was lost comes later, and what is kept for that is dropped when it fits no more."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from dynamiq_core import ConfigError
from dynamiq_ddp import DynamiQState

OPTIONS = {"codec": None, "backend": "numba", "error_feedback": True, "lanes": 1}


def step(state, tensor, parameters=(), index=0):
    return state.begin(tensor.clone(), index=index, parameters=parameters).wait()


def kept(state, bucket=0):
    """The residual of a bucket, as a checkpoint holds it."""
    return state.state_dict()["residuals"]["buckets"][bucket]["values"]


def gradients(rank, steps, d=4999, dtype=torch.float32):
    """A gradient for each step, of super-groups whose sizes span three orders of magnitude: [steps, d]."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(steps, d, generator=generator) * torch.logspace(0, -3, d)).to(dtype)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct"])
def test_all_that_was_lost_is_in_the_last_residuals(schedule, backend, states):
    """Sum of the means that were applied + mean of the last residuals = sum of the exact means."""
    steps, bits = 4, 2.0
    for n in (2, 3, 4):

        def work(state, rank):
            applied = [step(state, gradient) for gradient in gradients(rank, steps)]
            return torch.stack(applied).double().sum(dim=0), kept(state).double()

        options = OPTIONS | {"backend": backend}
        results = states(n, work, **options, bits=bits, schedule=schedule)
        exact = sum(gradients(rank, steps).double().sum(dim=0) for rank in range(n)) / n
        applied = results[0][0]
        residual = sum(residual for _, residual in results) / n
        assert float((applied + residual - exact).abs().max()) <= 2e-6
        assert float((applied - exact).norm() / exact.norm()) > 0.03  # so much would be missing otherwise
        assert all(torch.equal(other, applied) for other, _ in results)


@pytest.mark.parametrize(("n", "m"), [(4, 2), (6, 3), (6, 2)])
def test_all_that_was_lost_between_nodes_is_in_the_last_residuals(n, m, states):
    """Each rank keeps its own part of its node's mean; inside a node nothing is lost."""
    steps, d = 4, 4999

    def work(state, rank):
        applied = [step(state, gradient) for gradient in gradients(rank, steps, d)]
        stats = state.stats()
        assert stats.measured_vnmse == pytest.approx(stats.predicted_vnmse, rel=0.6)
        return torch.stack(applied).double().sum(dim=0), kept(state).double()

    results = states(n, work, **OPTIONS, bits=3.0, schedule=f"hierarchical:{m}", measure_every=1)
    exact = sum(gradients(rank, steps, d).double().sum(dim=0) for rank in range(n)) / n
    parts = [torch.stack([results[node * m + c][1] for node in range(n // m)]).mean(dim=0) for c in range(m)]
    applied = results[0][0]
    assert float((applied + torch.cat(parts) - exact).abs().max()) <= 2e-6
    assert float((applied - exact).norm() / exact.norm()) > 0.02
    assert all(torch.equal(other, applied) for other, _ in results)


def test_where_nothing_is_encoded_nothing_is_kept(states):
    """All ranks in one node; and a bucket of fewer coordinates than a node has ranks."""

    def work(state, rank):
        found = [step(state, gradient) for gradient in gradients(rank, 2, d=d)]
        return found, {
            bucket: len(entry["values"]) for bucket, entry in state.state_dict()["residuals"]["buckets"].items()
        }

    for n, m, d in ((4, 4, 4999), (6, 3, 2)):
        results = states(n, work, **OPTIONS, schedule=f"hierarchical:{m}")
        if n == m:
            mean = sum(gradients(rank, 2, d=d).double() for rank in range(n)) / n
            assert float((torch.stack(results[0][0]).double() - mean).abs().max()) <= 2e-6
        for rank, (found, entries) in enumerate(results):
            assert all(torch.equal(a, b) for a, b in zip(found, results[0][0], strict=True))
            assert entries == ({} if n == m or rank % m >= d else {0: 1})


@pytest.mark.parametrize("bits", [2.0, 2.5])
def test_what_compression_alone_cannot_train_is_trained(bits, states):
    """A bowl whose curvature falls by 100 from super-group to super-group, and gradients that differ by rank.

    At so few bits the flat directions are never sent. The step size is fit for each of them, so that with exact
    gradients all of them arrive.
    """
    groups, steps = 12, 60
    curvature = torch.logspace(0, -2, groups).repeat_interleave(256)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(curvature.numel(), generator=generator)
    shift = torch.randn(2, curvature.numel(), generator=generator)
    shift -= shift.mean(dim=0)

    def work(state, rank):
        x = torch.zeros_like(target)
        for _ in range(steps):
            x -= 0.05 / curvature * step(state, curvature * (x - target - shift[rank]))
        return float((x - target).square().mean())

    options = OPTIONS | {"bits": bits}
    with_feedback = states(2, work, **options)
    without = states(2, work, **options | {"error_feedback": False})
    assert with_feedback[0] == with_feedback[1]
    assert with_feedback[0] < 0.02
    assert without[0] > 0.3


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_on_one_rank_leaves_the_residuals_of_all_as_they_were(value, states):
    def work(state, rank):
        first, second, third = gradients(rank, 3)
        step(state, first)
        before = kept(state)
        if rank == 1:
            second[1234] = value
        assert not step(state, second)[1234].isfinite()
        assert torch.equal(kept(state), before)
        after = step(state, third)
        assert not torch.equal(kept(state), before)
        return before, after, third.double() + before.double() - kept(state).double()

    results = states(3, work, **OPTIONS, bits=3.0)
    for _, after, _ in results:
        assert torch.equal(after, results[0][1])
    delivered = sum(part for _, _, part in results) / 3
    assert float((delivered - results[0][1]).abs().max()) <= 2e-6


def test_an_overflow_in_the_first_step_leaves_nothing(states):
    def work(state, rank):
        bad = gradients(rank, 1)[0]
        bad[0] = torch.inf if rank else 1.0
        step(state, bad)
        return int(kept(state).count_nonzero())

    assert states(2, work, **OPTIONS) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_get_a_float32_residual(dtype, states):
    def work(state, rank):
        every = gradients(rank, 6, dtype=dtype)
        applied = torch.stack([step(state, gradient) for gradient in every])
        assert applied.dtype == dtype
        assert kept(state).dtype == torch.float32
        return applied.double().sum(dim=0) + kept(state).double() / 2, every.double().sum(dim=0) / 2, kept(state)

    (found, half, _), (_, other, residual) = states(2, work, **OPTIONS, bits=3.0)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]  # of six results, each at most about 4
    assert float((found + residual.double() / 2 - half - other).abs().max()) <= 6 * 4 * rounding


def test_a_loss_scale_that_changes_is_followed_when_told(states):
    """A power of two commutes with everything that the codec does, so the results must be exact multiples."""

    def work(state, rank, told=True, scale=4.0):
        found = []
        for number, gradient in enumerate(gradients(rank, 3)):
            factor = scale if number > 0 else 1.0
            if told:
                state.loss_scale = factor
            found.append(step(state, gradient * factor) / factor)
        return found

    plain = states(2, lambda state, rank: work(state, rank, scale=1.0), **OPTIONS, bits=3.0)[0]
    told = states(2, work, **OPTIONS, bits=3.0)[0]
    untold = states(2, lambda state, rank: work(state, rank, told=False), **OPTIONS, bits=3.0)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, told, strict=True))
    assert torch.equal(plain[0], untold[0])
    assert not torch.equal(plain[1], untold[1])


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "2", True])
def test_a_loss_scale_that_cannot_be_is_refused(scale):
    state = DynamiQState()
    with pytest.raises(ConfigError, match="loss_scale cannot be"):
        state.loss_scale = scale
    assert state.loss_scale == 1.0


def test_a_residual_is_good_for_the_parameters_that_it_was_kept_for(states):
    """With nothing kept, a step comes out as without error feedback, bit for bit."""

    def work(state, rank):
        a, b, c = (nn.Parameter(torch.zeros(50, 40)) for _ in range(3))
        gradient = gradients(rank, 1, d=4000)[0]
        # DDP may put parameters of the same shapes in another order.
        found = [step(state, gradient, parameters) for parameters in ((a, b), (a, b), (b, a))]
        state.reset_residuals()
        found += [step(state, gradient, parameters) for parameters in ((b, a), (b, a), (a, c))]
        return found

    plain = states(2, work, **OPTIONS | {"error_feedback": False}, bits=2.0)[0]
    for found in states(2, work, **OPTIONS, bits=2.0):
        equal = [torch.equal(x, y) for x, y in zip(found, plain, strict=True)]
        assert equal == [True, False, True, True, False, True]


def test_models_that_share_a_state_are_told_that_nothing_is_fed_back(states):
    def work(state, rank):
        models = [(nn.Parameter(torch.zeros(100)),) for _ in range(2)]
        for turn in range(6):
            step(state, torch.ones(100), models[turn % 2])

    with pytest.warns(UserWarning, match="a state of its own for each model") as caught:
        states(2, work, **OPTIONS)
    assert len([w for w in caught if "of its own" in str(w.message)]) == 2  # once on each rank


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("ring", torch.float32),
        ("ring", torch.bfloat16),
        ("butterfly", torch.float16),
        ("hierarchical:2", torch.float32),
    ],
)
def test_a_checkpoint_continues_bit_for_bit_on_every_rank(schedule, dtype, states):
    """By state_dict, and by pickling the whole state."""
    parameters = [(nn.Parameter(torch.zeros(4999)),) for _ in range(3)]  # of the first run, the second and the third

    def whole(state, rank):
        return [step(state, gradient, parameters[0]) for gradient in gradients(rank, 4, dtype=dtype)]

    saved, pickled = {}, {}

    def first(state, rank):
        found = [step(state, gradient, parameters[0]) for gradient in gradients(rank, 4, dtype=dtype)[:2]]
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        saved[rank] = torch.load(file, weights_only=True)
        pickled[rank] = pickle.loads(pickle.dumps(state)).state_dict(), copy.deepcopy(state).state_dict()
        return found

    def second(state, rank, run=1):
        state.load_state_dict(saved[rank] if run == 1 else pickled[rank][run - 2])
        return [step(state, gradient, parameters[1]) for gradient in gradients(rank, 4, dtype=dtype)[2:]]

    options = OPTIONS | {"bits": 2.5, "schedule": schedule}
    size = 4
    expected = states(size, whole, **options)[0]
    with pytest.warns(UserWarning, match="transport is not kept"):
        begun = states(size, first, **options)[0]
    for run in (1, 2, 3):
        ended = states(size, lambda state, rank, run=run: second(state, rank, run), **options)[0]
        assert all(torch.equal(a, b) for a, b in zip(expected, [*begun, *ended], strict=True))

    def forgetful(state, rank):
        state.load_state_dict({name: value for name, value in saved[rank].items() if name != "residuals"})
        return step(state, gradients(rank, 4, dtype=dtype)[2], parameters[2])

    assert not torch.equal(states(size, forgetful, **options)[0], expected[2])

    def other_schedule(state, rank):
        state.load_state_dict(saved[rank])
        return step(state, gradients(rank, 4, dtype=dtype)[2], parameters[2])

    if schedule == "hierarchical:2":
        with pytest.warns(UserWarning, match=r"of which this rank encodes 2\d\d\d from .* encodes 4999 from 0 on"):
            results = states(size, other_schedule, **OPTIONS, bits=2.5, schedule="ring")
        assert all(torch.equal(each, results[0]) for each in results)


def _changed(saved, **entries):
    residuals = saved["residuals"]
    return {**residuals, "buckets": {0: {**residuals["buckets"][0], **entries}}}


def test_residuals_that_do_not_fit_are_dropped_with_a_warning(states):
    def saved_by(size):
        def work(state, rank):
            step(state, gradients(rank, 1)[0])
            return state.state_dict()

        return states(size, work, **OPTIONS)

    two = saved_by(2)

    def fresh(state, rank):
        state.load_state_dict({**two[0], "residuals": {**two[0]["residuals"], "buckets": {}}})
        return step(state, gradients(rank, 2)[1])

    expected = states(3, fresh, **OPTIONS)[0]

    def more_ranks(state, rank):
        state.load_state_dict(two[rank % 2])
        return step(state, gradients(rank, 2)[1])

    with pytest.warns(UserWarning, match=r"those of rank \d of 2, and this is rank \d of 3") as caught:
        found = states(3, more_ranks, **OPTIONS)
    assert len([w for w in caught if "of 2" in str(w.message)]) == 3
    assert all(torch.equal(each, expected) for each in found)

    def everybody_loads_the_first(state, rank):
        state.load_state_dict(two[0])
        return step(state, gradients(rank, 2)[1])

    with pytest.warns(UserWarning, match="those of rank 0 of 2, and this is rank 1 of 2"):
        results = states(2, everybody_loads_the_first, **OPTIONS)
    assert torch.equal(*results)

    def other_layout(state, rank):
        state.load_state_dict(two[rank])
        return step(state, gradients(rank, 1, d=300)[0])

    with pytest.warns(UserWarning, match=r"saved for 4999 of torch.float32, .*now has 300 of"):
        results = states(2, other_layout, **OPTIONS)
    assert torch.equal(*results)

    without = DynamiQState()
    with pytest.warns(UserWarning, match="error_feedback is False here"):
        without.load_state_dict(two[0])
    assert "residuals" not in without.state_dict()
    state = DynamiQState(error_feedback=True)
    for broken in ({}, _changed(two[0], values=torch.ones(3)), _changed(two[0], part=3), {"buckets": 3}):
        with pytest.raises(ConfigError, match="residuals cannot be read"):
            state.load_state_dict({**two[0], "residuals": broken})
    assert state.steps == 0


def test_a_measurement_is_of_what_was_compressed(states):
    """So that it can be compared with the prediction: of gradients and residuals together."""

    def work(state, rank):
        for gradient in gradients(rank, 3, d=30_000):
            step(state, gradient)
        return state.stats()

    stats = states(4, work, **OPTIONS, bits=3.0, measure_every=1)[0]
    assert stats.measured_vnmse == pytest.approx(stats.predicted_vnmse, rel=0.4)


def test_what_is_not_compressed_has_no_residual(states):
    def work(state, rank):
        exact = step(state, gradients(rank, 1)[0])  # warm-up
        step(state, torch.ones(10), index=1)  # below the threshold
        assert state.state_dict()["residuals"]["buckets"] == {}
        step(state, gradients(rank, 2)[1])
        step(state, torch.ones(10), index=1)
        return exact, list(state.state_dict()["residuals"]["buckets"])

    mean = torch.stack([gradients(rank, 1)[0] for rank in range(2)]).mean(dim=0)
    for exact, buckets in states(2, work, **OPTIONS, warmup_steps=1, min_compress_numel=100):
        assert torch.equal(exact, mean)
        assert buckets == [0]


def test_a_failed_all_reduce_changes_no_residual(states):
    def work(state, rank):
        first, second = gradients(rank, 2)
        step(state, first)
        before = kept(state)
        if rank == 1:
            return before, before  # leaves
        with pytest.raises(RuntimeError, match="CommunicationError"):
            step(state, second)
        return before, kept(state)

    for before, after in states(3, work, **OPTIONS, timeout=5.0):
        assert torch.equal(before, after)
