"""The conformance suite over ranks that are threads of one process."""

from dynamiq_transport import run_local
from dynamiq_transport.conformance import Conformance


class TestLocalTransport(Conformance):
    launch = staticmethod(run_local)
    sizes = (1, 2, 3, 4, 5, 6, 7, 8)
