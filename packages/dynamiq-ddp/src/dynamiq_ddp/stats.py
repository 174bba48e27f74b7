"""What a state has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .meter import Meter


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Totals of this rank since the state was made.

    Attributes:
        steps: backward passes with communication.
        all_reduces: buckets, over all steps.
        bytes_sent: everything handed to the transport.
        bytes_agreement: thereof to compare what the ranks are about to do.
        bytes_statistics: thereof in phase 1.
        bytes_gradient: thereof in phase 2.
        coordinates: coordinates that this rank had to move, however many bits each: 2 (n - 1) / n times those of the
            gradient for a ring.
        bits_per_coordinate: 8 ``bytes_sent`` / ``coordinates``; 0 when nothing was sent.
        seconds_agreement: spent comparing.
        seconds_statistics: spent in phase 1, its messages and the plan included.
        seconds_codec: spent encoding and decoding.
        seconds_network: spent exchanging messages of phase 2.
        seconds_exposed: for which the end of the backward pass had to wait.
        backend: what carries out the codec's operations.
    """

    steps: int
    all_reduces: int
    bytes_sent: int
    bytes_agreement: int
    bytes_statistics: int
    bytes_gradient: int
    coordinates: float
    bits_per_coordinate: float
    seconds_agreement: float
    seconds_statistics: float
    seconds_codec: float
    seconds_network: float
    seconds_exposed: float
    backend: str


def collect(meters: Sequence[Meter], *, steps: int, seconds_exposed: float, backend: str) -> Stats:
    """Add up the meters of all lanes."""
    sent = sum(meter.bytes_sent for meter in meters)
    coordinates = sum(meter.coordinates for meter in meters)
    return Stats(
        steps=steps,
        all_reduces=sum(meter.all_reduces for meter in meters),
        bytes_sent=sent,
        bytes_agreement=sum(meter.bytes["agreement"] for meter in meters),
        bytes_statistics=sum(meter.bytes["statistics"] for meter in meters),
        bytes_gradient=sum(meter.bytes["gradient"] for meter in meters),
        coordinates=coordinates,
        bits_per_coordinate=8 * sent / coordinates if coordinates else 0.0,
        seconds_agreement=sum(meter.seconds("agreement") for meter in meters),
        seconds_statistics=sum(meter.seconds("statistics") for meter in meters),
        seconds_codec=sum(meter.seconds("codec") for meter in meters),
        seconds_network=sum(meter.seconds("network") for meter in meters),
        seconds_exposed=seconds_exposed,
        backend=backend,
    )
