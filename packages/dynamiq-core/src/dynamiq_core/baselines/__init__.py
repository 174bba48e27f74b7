"""Other people's ways to compress a gradient, behind the same protocol, to compare with and to fall back on."""

from dynamiq_core.baselines.bf16 import BF16 as BF16

__all__ = ["BF16"]
