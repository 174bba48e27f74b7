"""A byte-level GPT in one screen: pre-norm, rotary positions, squared ReLU, no dropout.

Shapes: B sequences, T bytes of context, D width, H heads, V = 256 byte values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

BYTES = 256
"""V, the number of byte values."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model; the default has 3.3 million parameters.

    Attributes:
        width: D, a multiple of twice the number of heads.
        layers: number of blocks.
        heads: number of heads H.
        context: T, the length of the inputs.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)
        # Every block starts as the identity, so that learning does not wait for random features to settle.
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.contract.weight)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        perceived: Tensor = self.contract(relu(self.expand(self.perceptron_norm(x))).square())
        return x + perceived


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        config: size of the model.
        seed: seed of the initial parameters; the global generator is left as it was.
    """

    def __init__(self, config: GPTConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or GPTConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(BYTES, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, BYTES, bias=False)
            for module in (self.embedding, self.head):
                nn.init.normal_(module.weight, std=0.02)
        self.head_size = config.width // config.heads

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map int64 [B, T] to logits [B, T, V] or, given the targets, to their mean loss in nats."""
        rotation = angles(inputs.shape[-1], self.head_size).to(inputs.device)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits.flatten(0, -2), targets.flatten())


def angles(positions: int, size: int) -> Tensor:
    """Cosines and sines [2, T, size / 2] of rotary position embeddings (Su et al., 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    turns = torch.outer(torch.arange(positions), frequencies)
    return torch.stack((turns.cos(), turns.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + size / 2}) of ``x`` [B, H, T, size] by their position's angles."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
