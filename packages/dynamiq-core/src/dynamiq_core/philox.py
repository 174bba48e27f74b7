"""Counter-based random numbers: the same words on every backend, device and thread count.

Philox 4x32-7, from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), where seven
rounds are the fewest that pass all tests of BigCrush. The customary ten keep a margin beyond that for uses that nobody
has foreseen; here a draw decides which way a gradient is rounded, and the rounds are a good part of a kernel's time.
Words are held in int64 tensors, since torch has no arithmetic on unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor | int, ...], key: tuple[int, int], *, rounds: int = ROUNDS) -> Tensor:
    """Four random 32-bit words for every counter.

    Args:
        counter: four words, each an int or an int64 tensor with values in [0, 2**32); they broadcast.
        key: two words in [0, 2**32).
        rounds: number of rounds.

    Returns:
        int64 [..., 4] with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter  # integers stay integers until they meet a tensor, on whatever device it is
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    device = next((c.device for c in counter if isinstance(c, Tensor)), None)
    words = (torch.as_tensor(c, dtype=torch.int64, device=device) for c in (c0, c1, c2, c3))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)  # type: ignore[no-untyped-call]


def _multiply(a: int, b: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """High and low word of a 32 x 32 bit product; partial products of 48 bits keep clear of the sign bit."""
    low_part = a * (b & 0xFFFF)
    middle = a * (b >> 16) + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)
