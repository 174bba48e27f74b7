"""The small all-gather of records."""

from __future__ import annotations

import pytest

from dynamiq_transport import Transport, gather_records, run_local


@pytest.mark.parametrize("size", range(1, 18))
def test_every_rank_gets_every_record(size: int) -> None:
    def work(transport: Transport) -> list[bytes]:
        return gather_records(transport, bytes([transport.rank]) * (transport.rank % 5), 4)

    assert run_local(size, work, timeout=20) == [[bytes([rank]) * (rank % 5) for rank in range(size)]] * size


def test_every_rank_takes_part_in_every_exchange() -> None:
    """A backend that connects in its first call needs all ranks in it."""

    def work(transport: Transport) -> int:
        calls = 0
        exchange = transport.exchange

        def counted(*messages: object) -> object:
            nonlocal calls
            calls += 1
            assert all(messages)
            return exchange(*messages)  # type: ignore[arg-type]

        transport.exchange = counted  # type: ignore[method-assign,assignment]
        gather_records(transport, b"x", 1)
        return calls

    assert run_local(11, work, timeout=20) == [4] * 11


def test_too_long_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        run_local(1, lambda transport: gather_records(transport, b"12345", 4), timeout=5)
