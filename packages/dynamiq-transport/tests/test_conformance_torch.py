"""The conformance suite over Gloo, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynamiq_transport.conformance import Conformance


class TestTorchTransport(Conformance):
    sizes = (1, 2, 3, 4, 8)

    @pytest.fixture(autouse=True)
    def _launch(self, torch_threads: Callable[..., list[Any]]) -> None:
        self.launch = torch_threads
