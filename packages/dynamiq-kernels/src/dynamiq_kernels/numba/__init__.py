"""The codec's operations for CPUs, compiled by Numba; messages are bit-equal to those of `dynamiq_core.reference`.

One loop over super-groups per operation. The 256 coordinates at hand stay in the first-level cache from the gradient to
the message, in loops that LLVM turns into vector instructions. The first call compiles for some seconds unless the disk
cache knows this processor; `dynamiq_kernels.warmup` takes that ahead.
"""

from dynamiq_kernels.numba.accumulate import decompress_accumulate
from dynamiq_kernels.numba.finish import finish
from dynamiq_kernels.numba.hop import decompress_accumulate_recompress
from dynamiq_kernels.numba.plan import make_plan
from dynamiq_kernels.numba.statistics import statistics

name = "numba"

__all__ = ["decompress_accumulate", "decompress_accumulate_recompress", "finish", "make_plan", "name", "statistics"]
