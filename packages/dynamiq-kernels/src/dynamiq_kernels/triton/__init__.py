"""The codec's operations as fused Triton kernels, bit-equal to `dynamiq_core.reference`: for GPUs.

One launch serves all bit widths, which are read from the plan on the device; nothing is read on the host, and of a
gradient nothing between input and output goes to memory. Importing needs no GPU. On CPUs the kernels run in Triton's
interpreter, for tests, if TRITON_INTERPRET=1 is set before Triton is imported.
"""

from dynamiq_kernels.triton.accumulate import decompress_accumulate
from dynamiq_kernels.triton.finish import finish
from dynamiq_kernels.triton.hop import decompress_accumulate_recompress
from dynamiq_kernels.triton.plan import make_plan
from dynamiq_kernels.triton.statistics import statistics

name = "triton"

__all__ = ["decompress_accumulate", "decompress_accumulate_recompress", "finish", "make_plan", "name", "statistics"]
