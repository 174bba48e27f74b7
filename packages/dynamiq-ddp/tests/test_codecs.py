"""Every codec of this repository against what every codec must do."""

from __future__ import annotations

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.baselines import BF16, MXFP4, MXFP6, MXFP8, THC, OmniReduce
from dynamiq_ddp.conformance import CodecConformance
from dynamiq_kernels import operations


class TestDynamiQ(CodecConformance):
    make = staticmethod(lambda: DynamiQ(operations=operations()))
    worst = 0.02
    # Kernels need a device that computes; core's own tests watch the reference.
    test_nothing_is_read_on_the_host = None


class TestPaper(TestDynamiQ):
    make = staticmethod(lambda: DynamiQ(CodecConfig.paper(), operations=operations()))
    worst = 0.04
    ranks = (3,)


class TestBF16(CodecConformance):
    make = BF16
    worst = 2e-5


class TestMXFP8(CodecConformance):
    make = MXFP8
    worst = 5e-3


class TestMXFP8E5M2(CodecConformance):
    make = staticmethod(lambda: MXFP8("e5m2"))
    worst = 1.5e-2
    ranks = (3,)


class TestMXFP6(CodecConformance):
    make = MXFP6
    worst = 5e-3


class TestMXFP6E3M2(CodecConformance):
    make = staticmethod(lambda: MXFP6("e3m2"))
    worst = 1.5e-2
    ranks = (3,)


class TestMXFP4(CodecConformance):
    make = MXFP4
    worst = 0.1


class TestTHC(CodecConformance):
    make = THC
    worst = 6e-3


class TestOmniReduce(CodecConformance):
    make = OmniReduce
    worst = 0.7
