"""The state by itself: what it refuses, counts, tells, and keeps; without DDP, over transports that are given to it."""

import copy
import gc
import json
import logging
import pickle
import re
import weakref
from dataclasses import asdict

import pytest
import torch
from torch import nn

from dynamiq_core import CodecConfig, ConfigError, DynamiQ, InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, ConfigMismatchError, DynamiQState, simulate
from dynamiq_ddp.quality import Quality
from dynamiq_transport import LocalTransport, ring


def step(state, tensors):
    """One backward pass: begin every bucket, then wait for all."""
    futures = [state.begin(tensor, index=index) for index, tensor in enumerate(tensors)]
    return [future.wait() for future in futures]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 0.5}, r"bits .* must be"),
        ({"bits": "five"}, r"bits .* must be"),
        ({"seed": -1}, "seed must be"),
        ({"schedule": "star"}, "schedule cannot be 'star'; allowed: ring"),
        ({"codec": "bf16"}, "codec cannot be 'bf16'"),
        ({"codec": BF16(), "bits": 4.0}, "codec cannot be given together with bits"),
        ({"codec": BF16(), "config": CodecConfig()}, "codec cannot be given together with bits, config"),
        ({"config": CodecConfig(), "bits": 4.0}, "config cannot be given together with bits or seed"),
        ({"config": CodecConfig(), "seed": 1}, "config cannot be given together with bits or seed"),
        ({"config": {"bits": 4.0}}, "config cannot be {'bits': 4.0}; allowed: a dynamiq_core.CodecConfig"),
        ({"min_compress_numel": -1}, "min_compress_numel cannot be -1"),
        ({"min_compress_numel": 1.5}, "min_compress_numel cannot be 1.5"),
        ({"warmup_steps": True}, "warmup_steps cannot be True"),
        ({"measure_every": None}, "measure_every cannot be None"),
        ({"lanes": 0}, "lanes cannot be 0"),
        ({"timeout": 0}, "timeout cannot be 0"),
        ({"timeout": None}, "timeout cannot be None"),
        ({"timeout": float("inf")}, "timeout cannot be inf"),
        ({"error_feedback": 1}, "error_feedback cannot be 1; allowed: True or False"),
        ({"error_feedback": True, "codec": BF16()}, r"error_feedback cannot be True with BF16\(\)"),
        ({"transport": list, "process_group": object()}, "transport cannot be given together with process_group"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        DynamiQState(**arguments)


def test_a_state_needs_a_process_group_only_when_it_is_used():
    state = DynamiQState()
    assert state.stats().bytes_sent == 0
    with pytest.raises(ConfigError, match="init_process_group"):
        state.begin(torch.ones(3), index=0)


def test_what_is_no_process_group_is_refused_when_used():
    with pytest.raises(ConfigError, match="no transport can be made"):
        DynamiQState(process_group=lambda: 1 / "x").begin(torch.ones(3), index=0)


def test_gradients_on_a_device_of_another_kind_are_refused():
    state = DynamiQState(transport=lambda: LocalTransport.group(1)[0])
    with pytest.raises(InputError, match="gradients cannot be on meta; allowed: cpu and cuda"):
        state.begin(torch.empty(10, device="meta"), index=0)


@pytest.mark.parametrize("schedule", ["ring", "butterfly", "direct", ring])
def test_buckets_come_out_as_the_simulation_says(schedule, states, random_rows, same_bits):
    rows = [random_rows(3, size, seed=size) for size in (5000, 300, 4097)]

    def work(state, rank):
        return [step(state, [row[rank].clone() for row in rows]) for _ in range(2)]

    expected = [
        [simulate(row, codec=DynamiQ(), schedule=schedule, step=s, bucket=b).mean for b, row in enumerate(rows)]
        for s in range(2)
    ]
    for found in states(3, work, codec=None, backend="reference", schedule=schedule):
        for got, want in zip(found, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_stats_count_what_was_sent(states):
    d = 20_000

    def work(state, rank):
        tensors = [torch.randn(d, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
        for _ in range(3):
            step(state, tensors)
        return state.stats()

    for stats in states(2, work, codec=None, backend="reference"):
        assert stats.steps == 3
        assert stats.all_reduces == 6
        assert stats.coordinates == 6 * d  # 2 (n - 1) / n = 1
        assert stats.bytes_sent == stats.bytes_agreement + stats.bytes_statistics + stats.bytes_gradient
        # Once for each bucket beforehand; then for the first one in each step, in 8 bytes.
        assert stats.bytes_agreement == 2 * 16 + 2 * 8
        assert stats.bits_per_coordinate == pytest.approx(8 * stats.bytes_sent / stats.coordinates)
        assert 4.9 < stats.bits_per_coordinate <= 5.0
        assert stats.backend == "reference"
        assert min(stats.seconds_statistics, stats.seconds_codec, stats.seconds_network) > 0
        json.dumps(asdict(stats))


def test_stats_survive_closing(states):
    def work(state, rank):
        step(state, [torch.ones(100)])
        before = state.stats()
        state.close()
        return before, state.stats()

    for before, after in states(2, work):
        assert before == after
        assert before.bytes_sent > 0


def test_the_codecs_own_expectation_and_a_measurement(states):
    rows = torch.randn(4, 30_000, generator=torch.Generator().manual_seed(0))

    def work(state, rank):
        for _ in range(3):
            tensors = [rows[rank].clone(), rows[rank, :8000].clone()]
            step(state, tensors)
        return state.stats()

    plain = states(4, work, codec=None, backend="reference")[0]
    assert plain.measured_vnmse is None
    assert plain.widths == {}
    assert plain.bytes_measurement == 0
    stats = states(4, work, codec=None, backend="reference", measure_every=2)[0]
    assert stats.predicted_vnmse == pytest.approx(plain.predicted_vnmse, rel=0.02)
    assert stats.measured_vnmse == pytest.approx(stats.predicted_vnmse, rel=0.2)
    parts = [
        simulate(rows[:, :d].contiguous(), codec=DynamiQ(), step=2, bucket=b) for b, d in enumerate((30_000, 8000))
    ]
    energies = [float(rows[:, :d].double().mean(dim=0).square().sum()) for d in (30_000, 8000)]
    measured = sum(p.vnmse * e for p, e in zip(parts, energies, strict=True)) / sum(energies)
    assert stats.measured_vnmse == pytest.approx(measured, rel=1e-4)
    assert sum(stats.widths.values()) == pytest.approx(1)
    assert 2 <= sum(width * share for width, share in stats.widths.items()) <= 5
    assert stats.bytes_measurement == 2 * 38_000 * 4 * 3 // 2 + 2 * 2 * 6 * 16  # two steps, exact, with headers


def test_the_error_is_foreseen_in_the_first_compressed_step_and_in_every_eighth_from_there(states, monkeypatch):
    """And in those that are measured, with which it is compared."""
    seen = []
    expect = Quality.expect

    def note(self, plan, mean, route):
        seen.append(plan.key.step)
        expect(self, plan, mean, route)

    monkeypatch.setattr(Quality, "expect", note)

    def work(state, rank):
        for _ in range(21):
            step(state, [torch.randn(5000) for _ in range(3)])
        return state.stats().predicted_vnmse

    for measure_every, measured in ((0, ()), (15, (15,))):
        seen.clear()
        expected = states(2, work, codec=None, warmup_steps=3, measure_every=measure_every)
        assert sorted(seen) == sorted(2 * 3 * [3, 11, 19, *measured])
        assert all(1e-4 < each < 1e-2 for each in expected)


def test_a_codec_that_expects_nothing(states):
    def work(state, rank):
        step(state, [torch.ones(100)])
        return state.stats()

    assert [stats.predicted_vnmse for stats in states(2, work)] == [None, None]


def test_logging_to_tensorboard(states):
    class Writer(dict):
        def add_scalar(self, tag, value, step):
            self[tag] = (value, step)

    def work(state, rank):
        step(state, [torch.randn(5000)])
        writer = Writer()
        state.log_to(writer, 7)
        return writer, state.stats()

    for writer, stats in states(2, work, codec=None, backend="reference", measure_every=1):
        assert writer["dynamiq/bits_per_coordinate"] == (stats.bits_per_coordinate, 7)
        assert writer["dynamiq/measured_vnmse"] == (stats.measured_vnmse, 7)
        assert any(tag.startswith("dynamiq/widths/") for tag in writer)
        assert "dynamiq/backend" not in writer


def test_the_backend_is_announced(states, caplog):
    with caplog.at_level(logging.INFO, logger="dynamiq_ddp"):
        states(2, lambda state, rank: step(state, [torch.ones(3)]))
    assert "rank 0 of 2, 2 lanes on cpu" in caplog.text
    assert "BF16()" in caplog.text


def test_bits_can_change_between_steps(states):
    d = 50_000

    def work(state, rank):
        found = []
        for bits in (5.0, 3.0, 8.0):
            state.bits = bits
            assert state.bits == bits
            before = state.stats()
            step(state, [torch.randn(d, generator=torch.Generator().manual_seed(rank))])
            after = state.stats()
            found.append(8 * (after.bytes_sent - before.bytes_sent) / d)
        return found

    for found in states(2, work, codec=None, backend="reference"):
        assert found == pytest.approx([5.0, 3.0, 8.0], rel=0.01)


def test_a_configuration_is_used_and_keeps_what_is_not_changed(states, random_rows, same_bits):
    """Energies far apart, so that the tolerance matters."""
    rows = random_rows(3, 20_000, seed=0) * torch.exp2(-torch.arange(20_000) / 1000)
    config = CodecConfig(bits=4.5, tolerance=1.0, rounding="independent", seed=7)

    def work(state, rank):
        before = step(state, [rows[rank].clone()])
        state.bits = 3.5
        return before + step(state, [rows[rank].clone()])

    expected = [
        simulate(rows, codec=DynamiQ(each), step=index).mean
        for index, each in enumerate((config, config.replace(bits=3.5)))
    ]
    for found in states(3, work, codec=None, config=config, backend="reference"):
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_bits_are_those_of_the_codec():
    assert DynamiQState(bits=4.5).bits == 4.5
    assert DynamiQState(config=CodecConfig(bits=3.25)).bits == 3.25
    assert DynamiQState(codec=DynamiQ(CodecConfig(bits=3.5))).bits == 3.5
    state = DynamiQState(codec=BF16())
    assert state.bits is None
    with pytest.raises(ConfigError, match="bits cannot be set"):
        state.bits = 4
    with pytest.raises(ConfigError, match=r"bits .* must be"):
        DynamiQState().bits = 100


def test_layouts_that_differ_are_named(states):
    def work(state, rank):
        step(state, [torch.ones(100), torch.ones(50)])
        with pytest.raises(RuntimeError, match="ConfigMismatchError") as caught:
            step(state, [torch.ones(60 + rank), torch.ones(50)])
        return str(caught.value)

    for rank, text in enumerate(states(2, work)):
        assert re.search(rf"bucket: .*number of elements: {60 + rank}, .* on rank {rank}", text)
        assert re.search(rf"bucket: .*something else \(\w\w\) on rank {1 - rank}", text)


def test_steps_that_differ_are_named(states):
    def work(state, rank):
        if rank == 1:
            state.load_state_dict({"version": 1, "steps": 5, "codec": "bf16"})
        with pytest.raises(RuntimeError, match="ConfigMismatchError"):
            step(state, [torch.ones(60)])
        return True

    assert all(states(2, work))


def test_errors_of_a_lane_reach_whoever_waits_for_the_future(states):
    """Outside of a backward pass, where no callback raises them, as under DDP's join."""

    def work(state, rank):
        step(state, [torch.ones(60)])
        if rank == 1:
            return True  # leaves
        with pytest.raises(RuntimeError, match=r"CommunicationError[\s\S]*step 1, bucket 0"):
            step(state, [torch.ones(60)])
        with pytest.raises(CommunicationError):
            state.begin(torch.ones(60), index=0)
        return True

    assert all(states(2, work, timeout=0.5))


@pytest.mark.parametrize("schedule", ["ring", "butterfly"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"error_feedback": True}, {"measure_every": 1}, {"warmup_steps": 1}], ids=str)
def test_empty_buckets(settings, n, schedule, states):
    """The first of a step and the last; and an empty parameter in a bucket with others, exempt or not."""
    shapes = [[(0, 4)], [(20, 30), (4, 0), (7,)], [(0,)]]
    parameters = [[nn.Parameter(torch.zeros(shape)) for shape in bucket] for bucket in shapes]
    exempt = [parameters[1][1], parameters[1][2]]

    def work(state, rank):
        found = []
        for _ in range(3):
            tensors = [torch.full((sum(p.numel() for p in bucket),), float(rank)) for bucket in parameters]
            futures = [state.begin(x, index=i, parameters=parameters[i]) for i, x in enumerate(tensors)]
            found.append([future.wait() for future in futures])
        return found

    mean = (n - 1) / 2
    for found in states(n, work, codec=None, backend="numba", schedule=schedule, exempt=exempt, **settings):
        for first, full, last in found:
            assert first.numel() == last.numel() == 0
            assert (full[600:] == mean).all()
            assert full.tolist() == pytest.approx([mean] * 607, rel=0.1)


WAYS = {
    "compressed": {},
    "below the threshold": {"min_compress_numel": 10**6},
    "warm-up": {"warmup_steps": 1},
    "measured": {"measure_every": 1},
    "with feedback": {"error_feedback": True},
    "partly exempt": {"exempt": lambda p: p.dim() == 1},
    "all exempt": {"exempt": lambda p: True},
    "over nodes": {"schedule": "hierarchical:2"},
    "over a butterfly": {"schedule": "butterfly"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_is_in_the_memory_of_the_bucket(way, dtype, states):
    """DDP keeps views of it, some of which are the parameters' gradients."""
    parameters = [nn.Parameter(torch.zeros(10, 30, dtype=dtype)), nn.Parameter(torch.zeros(7, dtype=dtype))]

    def work(state, rank):
        bucket = torch.empty(307, dtype=dtype)
        views = bucket[:300].view(10, 30), bucket[300:]
        for factor in (1, 2):
            bucket.fill_(factor * rank)
            mean = state.begin(bucket, index=0, parameters=parameters).wait()
            assert mean.data_ptr() == bucket.data_ptr()
            assert mean.dtype == dtype
            for view in views:
                assert torch.allclose(view, torch.full_like(view, 1.5 * factor), rtol=0.1)
        return True

    assert all(states(4, work, codec=None, backend="numba", **WAYS[way]))


def test_a_dropped_state_closes_its_lanes(states):
    group = LocalTransport.group(1)
    state = DynamiQState(codec=BF16(), lanes=1, transport=lambda: group[0])
    step(state, [torch.ones(5)])
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="closed"):
        group[0].exchange([], [])


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_keeps_settings_and_steps(copying):
    state = DynamiQState(
        bits=3.5, schedule="butterfly", backend="reference", lanes=3, seed=4, warmup_steps=2, timeout=9
    )
    state.load_state_dict({**state.state_dict(), "steps": 12})
    twin = copying(state)
    assert repr(twin) == repr(state)
    assert twin.state_dict() == state.state_dict()
    assert twin._settings == state._settings
    given = copying(DynamiQState(codec=DynamiQ(CodecConfig(bits=3.0))))
    assert given.bits == 3.0
    assert "reference" in repr(given)
    with pytest.warns(UserWarning, match="transport is not kept"):
        copying(DynamiQState(transport=list))


def test_a_checkpoint_is_plain_data_and_checked():
    state = DynamiQState(bits=4.0)
    saved = state.state_dict()
    assert json.loads(json.dumps(saved)) == saved
    other = DynamiQState(bits=5.0)
    with pytest.warns(UserWarning, match=r"bits=4\.0.*bits=5\.0"):
        other.load_state_dict({**saved, "steps": 3})
    assert other.steps == 3
    for broken in ({}, {"version": 2, "steps": 1}, {"version": 1, "steps": "x"}, {"version": 1, "steps": -1}):
        with pytest.raises(ConfigError, match="state cannot be"):
            other.load_state_dict(broken)
    assert other.steps == 3


def test_a_resumed_state_continues_with_the_same_random_numbers(states, random_rows, same_bits):
    rows = random_rows(2, 5000)

    def whole(state, rank):
        return [step(state, [rows[rank].clone()])[0] for _ in range(4)]

    saved = {}

    def first(state, rank):
        found = [step(state, [rows[rank].clone()])[0] for _ in range(2)]
        saved[rank] = state.state_dict()
        return found

    def second(state, rank):
        state.load_state_dict(saved[rank])
        return [step(state, [rows[rank].clone()])[0] for _ in range(2)]

    settings = {"codec": None, "backend": "reference"}
    (uninterrupted, _), (begun, _), (ended, _) = (states(2, f, **settings) for f in (whole, first, second))
    assert all(same_bits(a, b) for a, b in zip(uninterrupted, [*begun, *ended], strict=True))
    assert not same_bits(uninterrupted[0], uninterrupted[1])


def test_mismatch_at_the_first_step_is_its_own_error_type(states):
    """The typed error is what a training loop sees; here it is quoted by the future."""

    def work(state, rank):
        future = state.begin(torch.ones(10 + rank), index=0)
        with pytest.raises(RuntimeError, match="ConfigMismatchError"):
            future.wait()
        with pytest.raises(ConfigMismatchError):
            state.begin(torch.ones(10), index=1)
        return True

    assert all(states(2, work))
