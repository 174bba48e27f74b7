"""What concerns the Numba backend alone: threads, forks, addresses beyond 32 bits, any alignment, the cache on disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, get_ident
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, Operations, Received, reference
from dynamiq_core.rounding import Key, Stream, draws
from dynamiq_core.wire import LARGEST_NUMEL

CPU = torch.device("cpu")
NUMEL = 2**17 + 77


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["team", "helpers"])
def sharing(request: pytest.FixtureRequest, numba: Operations, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that shares out work, among torch's own threads and among helpers."""
    module = sys.modules["dynamiq_kernels.numba.threads"]
    if request.param == "helpers":
        monkeypatch.setattr(module.THREADS, "team", None)
    elif module.THREADS.team is None:
        pytest.skip("torch's OpenMP has no GOMP_parallel here")
    return module


def all_results(codec: DynamiQ, x: Tensor, plan: DynamiQPlan) -> list[Tensor]:
    """What every operation makes of a gradient."""
    first = codec.compress(x, plan, chunk=0, slot=0)
    second = codec.decompress_accumulate_recompress([Received(first, 0)], x, plan, chunk=0, slot=1)
    mean = codec.decompress(second, plan, chunk=0, slot=1, out=torch.zeros_like(x))
    total = codec.decompress_accumulate(second, x.clone(), plan, chunk=0, slot=1)
    return [codec.statistics(x), first, second, mean, total]


def plan_of(codec: DynamiQ, x: Tensor, chunks: int = 1) -> DynamiQPlan:
    return codec.plan(codec.statistics(x), x.numel(), device=CPU, workers=2, chunks=chunks)


def test_the_number_of_threads_does_not_matter(numba: Operations, sharing, gradient, threads) -> None:
    codec, x = DynamiQ(operations=numba), gradient(NUMEL)
    threads(1)
    plan = plan_of(codec, x)
    expected = all_results(codec, x, plan)
    for count in (2, 3, 8):
        threads(count)
        for actual, alone in zip(all_results(codec, x, plan), expected, strict=True):
            assert torch.equal(actual, alone)


def test_the_work_is_shared_among_as_many_threads_as_torch_uses(sharing, threads) -> None:
    ranges: list[tuple[int, int]] = []
    for count, used in ((0, 1), (sharing.SMALLEST, 1), (10_007, 1), (10_007, 3)):
        ranges.clear()
        threads(used)
        sharing.for_each_range(lambda first, last: ranges.append((first, last)), count)
        covered = [k for first, last in sorted(ranges) for k in range(first, last)]
        assert covered == list(range(count))
        assert (len(ranges) > 1) == (used > 1)


def test_threads_work_at_the_same_time(sharing, threads) -> None:
    """Three of them meet at a barrier, which no fewer can pass."""
    threads(3)
    barrier, met = Barrier(3), set()

    def meet(first: int, last: int) -> None:
        if get_ident() not in met:
            barrier.wait(timeout=30)
            met.add(get_ident())

    sharing.for_each_range(meet, 10_007)
    assert len(met) == 3
    assert get_ident() in met


def test_an_error_on_any_thread_reaches_the_caller(sharing, threads) -> None:
    threads(2)

    def fail(first: int, last: int) -> None:
        raise ValueError(f"range {first} to {last}")

    with pytest.raises(ValueError, match="range 0 to"):
        sharing.for_each_range(fail, 10_000)

    barrier, caller = Barrier(2), get_ident()

    def fail_elsewhere(first: int, last: int) -> None:
        barrier.wait(timeout=30)
        if get_ident() != caller:
            raise ValueError("elsewhere")

    with pytest.raises(ValueError, match="elsewhere"):
        sharing.for_each_range(fail_elsewhere, 2 * sharing.SMALLEST)


def test_eight_python_threads_at_once(numba: Operations, sharing, gradient, threads) -> None:
    """Ranks in one process call at the same time, each with helpers of its own."""
    threads(2)
    codec = DynamiQ(operations=numba)
    gradients = [gradient(NUMEL, seed) for seed in range(8)]
    plans = [plan_of(codec, x) for x in gradients]
    alone = [all_results(codec, x, plan) for x, plan in zip(gradients, plans, strict=True)]

    def run(i: int) -> bool:
        return all(
            torch.equal(a, b)
            for _ in range(5)
            for a, b in zip(all_results(codec, gradients[i], plans[i]), alone[i], strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside threads is what is tested
def test_the_child_of_a_fork_gets_helpers_of_its_own(numba: Operations, sharing, gradient, threads) -> None:
    threads(2)
    codec, x = DynamiQ(operations=numba), gradient(NUMEL)
    plan = plan_of(codec, x)
    expected = codec.compress(x, plan, chunk=0, slot=0)
    assert sharing.THREADS.team is not None or sharing.THREADS.helpers._pool is not None
    child = os.fork()
    if child == 0:  # only Python and the kernels: torch's own threads do not survive a fork
        seen: list[int] = []
        ok = sharing.THREADS.team is None and sharing.THREADS.helpers._pool is None
        sharing.for_each_range(lambda first, last: seen.append(last - first), 10_000)
        os._exit(0 if ok and sum(seen) == 10_000 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(codec.compress(x, plan, chunk=0, slot=0), expected)


def sparse(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros of which only those that are written take memory."""
    numpy = pytest.importorskip("numpy")
    return torch.from_numpy(numpy.zeros(numel, dtype={4: numpy.int32, 2: numpy.int16}[dtype.itemsize])).view(dtype)


def test_coordinates_beyond_32_bits(numba: Operations, gradient) -> None:
    """A super-group past coordinate 2**31, in a plan that has no other: every operation finds it."""
    numel = 2**31 + 256 * 3 + 5
    super_group = numel // 256
    values = gradient(5, dtype=torch.bfloat16)
    x = sparse(numel, torch.bfloat16)
    x[-5:] = values

    config = CodecConfig(widths=(6,), bits=6.5)
    codec = DynamiQ(config, operations=numba)
    small = DynamiQ(config).plan(torch.zeros(1, 2, dtype=torch.bfloat16), 5, device=CPU, workers=2, chunks=1)
    plan = replace(
        small,
        numel=numel,
        mean=sparse(super_group + 1, torch.float32),
        rows=torch.where(torch.arange(4) == 0, super_group, small.rows),
    )
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, 251))[None]
    expected = torch.empty(plan.sizes[0], dtype=torch.uint8)
    reference.encode(padded, plan, chunk=0, slot=1, out=expected)
    message = codec.compress(x, plan, chunk=0, slot=1)
    assert torch.equal(message, expected)

    out = sparse(numel, torch.bfloat16)
    codec.decompress(message, plan, chunk=0, slot=1, out=out)
    decoded = reference.add_message(torch.zeros(1, 256), message, plan, chunk=0, slot=1, share=0.5)[0, :5]
    assert torch.equal(out[-5:], decoded.to(torch.bfloat16))
    assert not out[:1000].any()
    assert not out[2**31 - 1000 : -5].any()


def test_draws_up_to_the_last_super_group_that_a_tensor_may_have(numba: Operations) -> None:
    """Its lane counter is just below 2**32."""
    numpy = pytest.importorskip("numpy")
    philox = sys.modules["dynamiq_kernels.numba.philox"]
    arguments = sys.modules["dynamiq_kernels.numba.chunk"]
    key = Key(seed=2**64 - 3, step=2**32 - 1, bucket=2**20)
    keys = numpy.zeros(philox.SIZE, dtype=numpy.uint64)
    words = [key.seed & 0xFFFFFFFF, key.seed >> 32, key.step, key.bucket]
    philox.expand_key(keys, arguments.Key(*(numpy.uint64(word) for word in words)))
    for super_group in (0, 1, 2**23, LARGEST_NUMEL // 256 - 1):
        drawn = numpy.zeros(64, dtype=numpy.uint64)
        philox.philox_words(drawn, super_group, 32, numpy.uint64(Stream.ROTATION << 24 | 5), keys)
        expected = draws(key, torch.tensor([super_group]), slot=5, stream=Stream.ROTATION)[0]
        assert drawn.view(numpy.uint16).tolist() == expected.tolist()


def test_messages_at_any_byte(numba: Operations, gradient) -> None:
    """Whoever carries a message may put a header of any length before it."""
    for config in (CodecConfig(), CodecConfig.paper()):
        codec, x = DynamiQ(config, operations=numba), gradient(5000)
        plan = plan_of(codec, x)
        size = plan.sizes[0]
        expected = all_results(DynamiQ(config), x, plan)
        for offset in (1, 2, 3, 5, 8, 31):
            buffer = torch.full((3 * (size + 64),), 0xAA, dtype=torch.uint8)
            first, second = buffer[offset : offset + size], buffer[size + 64 + offset : 2 * size + 64 + offset]
            codec.compress(x, plan, chunk=0, slot=0, out=first)
            codec.decompress_accumulate_recompress([Received(first, 0)], x, plan, chunk=0, slot=1, out=second)
            mean = codec.decompress(second, plan, chunk=0, slot=1, out=torch.zeros_like(x))
            for actual, wanted in zip((first, second, mean), expected[1:4], strict=True):
                assert torch.equal(actual, wanted)
            beside = torch.cat(
                (buffer[:offset], buffer[offset + size : size + 64 + offset], buffer[2 * size + 64 + offset :])
            )
            assert (beside == 0xAA).all(), "nothing is written beside a message"


def test_neighbours_of_a_vector_are_not_touched(numba: Operations, gradient) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codec, x = DynamiQ(operations=numba), gradient(1003, dtype=dtype)
        plan = plan_of(codec, x)
        message = codec.compress(x, plan, chunk=0, slot=0)
        buffer = torch.full((1003 + 600,), 7.0, dtype=dtype)
        codec.decompress(message, plan, chunk=0, slot=0, out=buffer[300:1303])
        assert (buffer[:300] == 7).all()
        assert (buffer[1303:] == 7).all()
        assert not (buffer[300:1303] == 7).all()


def test_a_kernel_on_disk_is_renewed_when_any_of_its_parts_changes(numba: Operations) -> None:
    compiling = sys.modules["dynamiq_kernels.numba.compiling"]
    hop = sys.modules["dynamiq_kernels.numba.hop"]._hop
    stamp = hop._cache._cache_file._source_stamp
    assert stamp[1] == compiling.SOURCES == compiling._digest_of_sources()


def test_kernels_exist_in_one_version_each(numba: Operations, gradient) -> None:
    """No dtype, kind of scales or rounding compiles another one in the middle of training."""
    kernels = {
        name: getattr(sys.modules[f"dynamiq_kernels.numba.{name}"], f"_{name}")
        for name in ("accumulate", "finish", "hop", "statistics")
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for config in (CodecConfig(), CodecConfig.paper(), CodecConfig(rounding="independent", bend=2.0)):
            codec, x = DynamiQ(config, operations=numba), gradient(700, dtype=dtype)
            plan = plan_of(codec, x, chunks=2)
            first = codec.compress(x, plan, chunk=1, slot=0)
            codec.decompress_accumulate_recompress([Received(first, 0)], x, plan, chunk=1, slot=1)
            codec.decompress(first, plan, chunk=1, slot=0, out=x.clone())
            codec.decompress_accumulate(first, x.to(torch.float32), plan, chunk=1, slot=0)
    assert {name: len(kernel.signatures) for name, kernel in kernels.items()} == dict.fromkeys(kernels, 1)
