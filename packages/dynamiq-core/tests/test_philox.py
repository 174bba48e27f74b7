from __future__ import annotations

import pytest
import torch

from dynamiq_core.philox import philox4x32
from dynamiq_core.rounding import Key, Stream, centred, draws, scale_draws

ZEROS, ONES = ((0,) * 4, (0,) * 2), ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
KNOWN_ANSWERS = [
    (7, *ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, *ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, *ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, *ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
"""Rounds, counter, key and output of philox4x32 as in the known-answer file of Random123."""


def philox_of_integers(rounds: int, counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The definition, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = second >> 32 ^ c1 ^ k0, second % 2**32
        c2, c3 = first >> 32 ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(rounds: int, counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    assert philox_of_integers(rounds, counter, key) == list(answer)
    assert philox4x32(counter, key, rounds=rounds).tolist() == list(answer)
    as_tensors = tuple(torch.tensor([word, 0]) for word in counter)
    assert philox4x32(as_tensors, key, rounds=rounds)[0].tolist() == list(answer)


def test_draws_take_seven_rounds() -> None:
    """The fewest that pass BigCrush, after Salmon et al. (2011)."""
    counter, key = PI
    assert philox4x32(counter, key).tolist() == philox_of_integers(7, counter, key)


def test_a_bit_of_counter_or_key_turns_every_bit_of_the_words_half_of_the_time() -> None:
    """What few rounds would fail: after three of them, some bits of a counter reach some bits of the words never.

    Neighbouring super-groups, coordinates and steps differ in few bits, so this is what their independence rests on.
    """
    samples = torch.arange(2048)
    sigma = 0.5 / len(samples) ** 0.5
    random = philox4x32((samples, 1, 2, 3), (4, 5), rounds=10)
    for rounds, good in ((3, False), (7, True)):
        base = philox4x32(tuple(random.unbind(1)), (6, 7), rounds=rounds)
        largest = 0.0
        for word in range(6):
            for bit in (0, 7, 16, 31):
                counter, key = list(random.unbind(1)), [6, 7]
                if word < 4:
                    counter[word] = counter[word] ^ (1 << bit)
                else:
                    key[word - 4] ^= 1 << bit
                turned = base ^ philox4x32(tuple(counter), (key[0], key[1]), rounds=rounds)
                share = (turned[..., None] >> torch.arange(32) & 1).double().mean(dim=0)
                largest = max(largest, (share - 0.5).abs().max().item() / sigma)
        assert (largest < 6) == good, (rounds, largest)


def test_counters_broadcast_against_integers() -> None:
    words = philox4x32((torch.arange(3)[:, None], torch.arange(2), 7, 0xFFFFFFFF), (1, 2))
    assert words.shape == (3, 2, 4)
    for i in range(3):
        for j in range(2):
            assert words[i, j].tolist() == philox4x32((i, j, 7, 0xFFFFFFFF), (1, 2)).tolist()


def test_where_every_draw_comes_from() -> None:
    key, slot = Key(seed=0xFEDCBA9876543210, step=0x1_0000_0005, bucket=0xFFFFFFFE), 3
    group = 2**27 - 1  # the lanes of the last super-group use the last counters
    got = draws(key, torch.tensor([5, group]), slot=slot, stream=Stream.SCALE)
    for row, index in enumerate((5, group)):
        for lane in range(32):
            words = philox4x32((32 * index + lane, 0xFFFFFFFE, 2 << 24 | slot, 0xFEDCBA98), (0x76543210, 5)).tolist()
            expected = [half for word in words for half in (word & 0xFFFF, word >> 16)]
            assert got[row, 8 * lane : 8 * lane + 8].tolist() == expected


def test_scale_draws_are_the_first_sixteen_of_the_scale_stream() -> None:
    key, groups = Key(1, 2, 3), torch.tensor([0, 9])
    every = draws(key, groups, slot=4, stream=Stream.SCALE)
    assert torch.equal(scale_draws(key, groups, slot=4), every[:, :16])


def test_streams_differ_in_every_part_of_the_key() -> None:
    groups = torch.arange(64)
    base = Key(seed=1, step=0, bucket=0)
    streams = {
        "base": draws(base, groups, slot=0),
        "other super-groups": draws(base, groups + 64, slot=0),
        "seed": draws(Key(2, 0, 0), groups, slot=0),
        "high half of the seed": draws(Key(1 + 2**32, 0, 0), groups, slot=0),
        "step": draws(Key(1, 1, 0), groups, slot=0),
        "bucket": draws(Key(1, 0, 1), groups, slot=0),
        "slot": draws(base, groups, slot=1),
        "rotation": draws(base, groups, slot=0, stream=Stream.ROTATION),
        "scale": draws(base, groups, slot=0, stream=Stream.SCALE),
    }
    centres = torch.stack([centred(stream).flatten().double() - 0.5 for stream in streams.values()])
    correlations = centres @ centres.T / centres.square().sum(dim=1).mean()
    sigma = centres.shape[1] ** -0.5
    off_diagonal = correlations - torch.diag(correlations.diag())
    assert off_diagonal.abs().max() < 6 * sigma, dict(zip(streams, off_diagonal.tolist(), strict=True))


def test_equal_keys_give_equal_draws_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    key = Key(3, 1, 4)
    assert torch.equal(draws(key, torch.arange(5), slot=1), draws(key, torch.arange(5), slot=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_do_not_depend_on_which_super_groups_are_asked_together() -> None:
    key = Key(3, 1, 4)
    together = draws(key, torch.arange(10), slot=2)
    assert torch.equal(draws(key, torch.tensor([7, 3]), slot=2), together[[7, 3]])


def test_the_average_of_stochastic_roundings_is_the_value() -> None:
    u = centred(draws(Key(0, 0, 0), torch.arange(79), slot=0)).flatten()[:20_000]
    assert torch.floor(0.3 + u).mean().item() == pytest.approx(0.3, abs=0.01)
