"""Other people's ways to compress a gradient, behind the same protocol, to compare with and to fall back on."""

from dynamiq_core.baselines.bf16 import BF16 as BF16
from dynamiq_core.baselines.mx import MXFP4 as MXFP4
from dynamiq_core.baselines.mx import MXFP6 as MXFP6
from dynamiq_core.baselines.mx import MXFP8 as MXFP8
from dynamiq_core.baselines.omnireduce import OmniReduce as OmniReduce
from dynamiq_core.baselines.thc import THC as THC

__all__ = ["BF16", "MXFP4", "MXFP6", "MXFP8", "THC", "OmniReduce"]
