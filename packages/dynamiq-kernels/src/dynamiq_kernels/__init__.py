"""DynamiQ's operations fused into one kernel each: Triton for GPUs, Numba for CPUs, the reference anywhere."""

from dynamiq_kernels.backends import Backend, available_backends, operations
from dynamiq_kernels.warmup import warmup

__version__ = "0.1.0"

__all__ = ["Backend", "available_backends", "operations", "warmup"]
