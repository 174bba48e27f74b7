from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynamiq_core import CodecConfig, DynamiQ, DynamiQPlan, InputError, Received
from dynamiq_core.allocation import cost
from dynamiq_core.levels import levels
from dynamiq_core.rounding import thresholds
from dynamiq_core.wire import LARGEST_MESSAGE, LARGEST_NUMEL, OVERHEAD, chunk_lengths, message_sizes

STATISTICS = 4


@settings(derandomize=True, deadline=None)
@given(numel=st.integers(1, 10**7), chunks=st.integers(1, 40))
def test_chunks_share_the_super_groups_to_within_one(numel: int, chunks: int) -> None:
    lengths = chunk_lengths(numel, chunks)
    assert len(lengths) == chunks
    assert sum(lengths) == math.ceil(numel / 256)
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)


@pytest.mark.parametrize("bits", [1, 1.5, 2, 3, 3.7, 4, 5, 6.25, 8, 9])
@pytest.mark.parametrize("scales", ["log", "linear"])
@pytest.mark.parametrize("numel", [4096, 4097, 5000, 65_535, 10**6, 123_456_789])
def test_everything_sent_stays_within_the_budget(bits: float, scales: Any, numel: int) -> None:
    """Messages, statistics and the engine's overhead, for any number of chunks that leaves two super-groups to each."""
    config = CodecConfig(bits=bits, scales=scales)
    total = math.ceil(numel / 256)
    for chunks in (1, 2, 3, 4, 5, 8, 64, 1024):
        if total < 2 * chunks:
            continue
        sent = sum(message_sizes(config, numel, chunks)) + STATISTICS * total + OVERHEAD * chunks
        assert sent <= bits * numel / 8
        if bits < 8:  # above, even the widest codes cannot use it all
            assert sent > bits * numel / 8 - chunks


@settings(derandomize=True, deadline=None)
@given(
    numel=st.integers(4096, 10**6),
    chunks=st.integers(1, 8),
    bits=st.floats(1, 9),
    top=st.integers(1, 8),
    scales=st.sampled_from(["log", "linear"]),
)
def test_any_budget_and_size(numel: int, chunks: int, bits: float, top: int, scales: Any) -> None:
    config = CodecConfig(bits=min(bits, top + 1), widths=(0, top), scales=scales)
    total = math.ceil(numel / 256)
    sizes = message_sizes(config, numel, chunks)
    assert sum(sizes) + STATISTICS * total + OVERHEAD * chunks <= config.bits * numel / 8
    assert all(0 <= s <= cost(top, config) * k for s, k in zip(sizes, chunk_lengths(numel, chunks), strict=True))


@pytest.mark.parametrize("widths", [(2,), (8,), (2, 4, 8)])
def test_widths_without_zero_always_fit_and_cost_at_most_the_overhead(widths: tuple[int, ...]) -> None:
    """The least budget is that of the lowest width: then there is nothing left from which to save the overhead."""
    config = CodecConfig(widths=widths, bits=max(widths) + 1)
    config = config.replace(bits=config.bits_range()[0])
    for numel in (256 * 16, 256 * 1000):
        sizes = message_sizes(config, numel, 4)
        assert list(sizes) == [cost(widths[0], config) * k for k in chunk_lengths(numel, 4)]
        assert sum(sizes) + STATISTICS * numel // 256 <= config.bits * numel / 8


@pytest.mark.parametrize("numel", [1, 2, 7, 255, 256, 257, 1000, 3840])
def test_small_tensors_are_granted_their_padding(numel: int) -> None:
    config, total = CodecConfig(bits=5), math.ceil(numel / 256)
    for chunks in (1, 2, 8):
        sizes = message_sizes(config, numel, chunks)
        assert [s > 0 for s in sizes] == [k > 0 for k in chunk_lengths(numel, chunks)]
        assert 160 * total - chunks < sum(sizes) + STATISTICS * total <= 160 * total


def test_sizes_follow_from_size_chunks_and_configuration_alone(plan_of, normal) -> None:
    """Rank 0 all zeros, rank 1 with one huge outlier, NaN, or anything else: no rank need learn a length."""
    outlier = normal(0, 3000)
    outlier[7] = 1e6
    broken = normal(1, 3000)
    broken[5] = math.nan
    gradients = (torch.zeros(3000), outlier, broken, torch.ones(3000))
    for config in (CodecConfig(), CodecConfig.paper(), CodecConfig(bits=1)):
        sizes = {plan_of([a, b], DynamiQ(config), chunks=2).sizes for a in gradients for b in gradients}
        assert sizes == {message_sizes(config, 3000, 2)}


@pytest.mark.parametrize("numel", [0, -1, LARGEST_NUMEL + 1])
def test_sizes_out_of_range(numel: int) -> None:
    with pytest.raises(InputError, match=f"1 to {LARGEST_NUMEL} coordinates, not {numel}"):
        message_sizes(CodecConfig(), numel, 4)


def test_messages_are_as_long_as_32_bit_offsets_reach() -> None:
    """Two to the 33 coordinates at five bits are 5 GiB: too much for one chunk or two, and fine for four."""
    for chunks in (1, 2):
        with pytest.raises(InputError, match=f"up to {LARGEST_MESSAGE} bytes, not .* more than {chunks} chunks"):
            message_sizes(CodecConfig(), 2**33, chunks)
    assert 2**30 < max(message_sizes(CodecConfig(), 2**33, 4)) <= LARGEST_MESSAGE
    assert max(message_sizes(CodecConfig(), LARGEST_NUMEL, 16)) <= LARGEST_MESSAGE


def bfloat16(pair: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + pair)[0])


def read_by_hand(message: bytes, plan: DynamiQPlan, *, chunk: int, slot: int) -> tuple[Tensor, Tensor]:
    """Codes and decoded values [m, 256] of a message, byte by byte as the format is described, in float64."""
    config, length = plan.config, plan.lengths[chunk]
    widths = plan.width[chunk, :length].tolist()
    per_group = 8 if config.scales == "log" else 16
    scales_at = 32 * sum(widths)
    nonzero = sum(w > 0 for w in widths)
    supers_at = scales_at + nonzero * per_group
    assert message[supers_at + 2 * nonzero :].strip(b"\0") == b""

    u = thresholds(config, plan.key, plan.index[chunk, :length].long(), slot=slot, workers=plan.workers).double()
    codes, values = torch.zeros(length, 256), torch.zeros(length, 256, dtype=torch.float64)
    at = 0
    for k, width in enumerate(widths):
        if width == 0:
            continue
        top = bfloat16(message[supers_at + 2 * k : supers_at + 2 * k + 2])
        group_codes = message[scales_at + per_group * k : scales_at + per_group * (k + 1)]
        table = levels(width, config.bend).double()
        for c in range(256):
            planes = [message[at + 32 * p + c // 8] >> c % 8 & 1 for p in range(width)]
            code = sum(bit << p for p, bit in enumerate(planes))
            g = c // 16
            if config.scales == "log":
                scale_code = group_codes[g % 8] >> 4 * (g // 8) & 15
                scale = 0.0 if scale_code == 15 else top * 2 ** (-scale_code / 4)
            else:
                scale = top * group_codes[g] / 255
            value = table[code].item()
            if config.rounding == "dithered":
                value -= (u[k, c].item() - 0.5) * dither(width, config.bend)
            codes[k, c], values[k, c] = code, scale * value
        at += 32 * width
    return codes, values


def dither(width: int, bend: float) -> float:
    """The gap that the receiver subtracts: a fifth of the way from the inner gap to the outer one.

    With many levels the inner gap is 2 / (1 + bend) of a uniform one. The result, in units of the true inner gap, is
    rounded to seven fractional bits.
    """
    table = levels(width, bend).double()
    inner_gap = (table[2 ** (width - 1)] * 2).item()
    uniform_gap = 2 / (2**width - 1)
    typical = 2 / (1 + bend) * (1 + 0.2 * (bend - 1)) * uniform_gap
    return round(typical / inner_gap * 128) / 128 * inner_gap


@pytest.mark.parametrize(
    "config",
    [
        CodecConfig(bits=3.5, seed=2**40 + 1),
        CodecConfig(bits=3.5, scales="linear", rounding="independent", bend=2.0),
        CodecConfig.paper(bits=4.0),
    ],
    ids=str,
)
def test_a_message_read_byte_by_byte(config: CodecConfig, plan_of, normal) -> None:
    """What the codec decodes is what the format says, and what it encodes is floor(position + threshold)."""
    loudness = torch.exp2(2 * normal(1, 8)).repeat_interleave(256)[:2000]
    gradients = [normal(i, 2000) * loudness for i in (2, 3)]
    gradients[0][300:340] = 0
    codec = DynamiQ(config)
    plan = plan_of(gradients, codec, step=7, bucket=3)
    assert len(plan.width.unique()) > 1
    for chunk in range(2):
        message = codec.compress(gradients[0], plan, chunk=chunk, slot=1)
        codes, values = read_by_hand(bytes(message.tolist()), plan, chunk=chunk, slot=1)
        total = codec.decompress_accumulate(message, torch.zeros(2000), plan, chunk=chunk, slot=1)
        rows = torch.nn.functional.pad(total, (0, 48)).view(-1, 256)[plan.index[chunk, : plan.lengths[chunk]].long()]
        real = torch.nn.functional.pad(torch.ones(2000), (0, 48)).view(-1, 256).bool()
        real = real[plan.index[chunk, : plan.lengths[chunk]].long()]
        assert (rows[real] - values[real]).abs().max() <= 2e-6 * values.abs().max()
        assert_codes_are_next_to_the_values(gradients[0], codes, values, plan, chunk)


def assert_codes_are_next_to_the_values(
    x: Tensor, codes: Tensor, values: Tensor, plan: DynamiQPlan, chunk: int
) -> None:
    """No error exceeds the largest gap plus half a dither, in units of the super-group's largest magnitude."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(-1, 256)
    for k, (j, width) in enumerate(zip(plan.index[chunk].tolist(), plan.width[chunk].tolist(), strict=True)):
        if j < 0 or width == 0:
            continue
        table = levels(width, plan.config.bend)
        gap = table.diff().max().item() * (1.5 if plan.config.rounding == "dithered" else 1.0)
        slack = 1 / 255 if plan.config.scales == "linear" else 0.01
        assert (values[k] - rows[j]).abs().max() <= (gap + 2 * slack) * rows[j].abs().max()
        assert codes[k].max() < 2**width


def deterministic(numel: int, salt: int) -> Tensor:
    """float32 [d] from integers and exact divisions alone: about six octaves more than 16 bits, both signs."""
    i = torch.arange(numel, dtype=torch.int64) + 1
    mixed = (i * 2654435761 + salt * 40503 + (i * i * 97 >> 3)) & 0xFFFF
    sign = 1 - 2 * (mixed & 1)
    return (sign * (mixed + 1)).float() / (1 << i // 256 % 7).float() / 65536


GOLDEN = {
    "default": "f281252e1c51b73fdfd95bf171da8528",
    "paper": "65d5e9a5af475ef8815adc5b7c3c3b4b",
    "independent, low budget": "20208bfb21a425ad935ad1b760c1f5b1",
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("default", CodecConfig()),
        ("paper", CodecConfig.paper()),
        ("independent, low budget", CodecConfig(bits=2.5, rounding="independent", seed=2**63 + 5, bend=2.0)),
    ],
)
def test_the_bytes_of_version_4(name: str, config: CodecConfig, plan_of) -> None:
    """Messages of a three-worker chain have not changed by a bit. Whoever changes them raises `wire.VERSION`."""
    gradients = [deterministic(6000, salt) for salt in range(3)]
    codec = DynamiQ(config)
    plan = plan_of(gradients, codec, step=11, bucket=2)
    digest = hashlib.sha256()
    for chunk in range(3):
        received: list[Received] = []
        for slot, x in enumerate(gradients):
            message = codec.decompress_accumulate_recompress(received, x, plan, chunk=chunk, slot=slot)
            received = [Received(message, slot)]
            digest.update(bytes(message.tolist()))
        mean = codec.decompress(message, plan, chunk=chunk, slot=2, out=torch.zeros(6000))
        digest.update(bytes(mean.view(torch.uint8).tolist()))
    assert digest.hexdigest()[:32] == GOLDEN[name]
