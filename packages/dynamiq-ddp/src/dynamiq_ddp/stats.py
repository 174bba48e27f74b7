"""What a state has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .lanes import Lane


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Totals of this rank since the state was made.

    Attributes:
        steps: backward passes with communication.
        all_reduces: over all steps; one for each bucket, and one more where some of its parameters are exempt.
        bytes_sent: everything handed to the transport.
        bytes_agreement: thereof to compare what the ranks are about to do.
        bytes_probe: thereof to measure the network, for schedules that are chosen by it.
        bytes_node: thereof inside a node, where the schedule knows nodes; it is not compressed.
        bytes_statistics: thereof in phase 1.
        bytes_gradient: thereof in phase 2.
        bytes_measurement: thereof to know the exact mean in steps that are measured.
        coordinates: coordinates that this rank had to move, however many bits each: 2 (n - 1) / n times those of the
            gradient for a ring.
        bits_per_coordinate: 8 (``bytes_sent`` - ``bytes_probe``) / ``coordinates``; 0 when nothing was sent.
        bits_between_nodes: the same without what was sent and moved inside a node, and without measurements.
        seconds_agreement: spent comparing.
        seconds_node: spent inside a node, adding up and exchanging.
        seconds_statistics: spent in phase 1, its messages and the plan included.
        seconds_codec: spent encoding and decoding.
        seconds_network: spent exchanging messages of phase 2.
        seconds_exposed: for which the end of the backward pass had to wait. On CUDA the host does not, and it is 0.
        seconds_hidden: of work that the lanes had done by then, beside the backward pass; likewise. The lanes work at
            the same time, and their seconds are added up.
        predicted_vnmse: squared error of the means, as the codec expects it, relative to their squared norm, over every
            eighth step and those that are measured; None where it says nothing. What the ranks' gradients have in
            common, which makes partial sums and errors larger, it takes from the means that came out.
        measured_vnmse: the same in the last step that was measured, against the exact mean; None before that.
        widths: share of the super-groups that had each bit width in that step; empty for other codecs.
        backend: what carries out the codec's operations.
    """

    steps: int
    all_reduces: int
    bytes_sent: int
    bytes_agreement: int
    bytes_probe: int
    bytes_node: int
    bytes_statistics: int
    bytes_gradient: int
    bytes_measurement: int
    coordinates: float
    bits_per_coordinate: float
    bits_between_nodes: float
    seconds_agreement: float
    seconds_node: float
    seconds_statistics: float
    seconds_codec: float
    seconds_network: float
    seconds_exposed: float
    seconds_hidden: float
    predicted_vnmse: float | None
    measured_vnmse: float | None
    widths: dict[int, float]
    backend: str


def collect(lanes: Sequence[Lane], *, steps: int, seconds_exposed: float, seconds_hidden: float, backend: str) -> Stats:
    """Add up what all lanes have done. Waits for the device, on CUDA."""
    meters = [lane.meter for lane in lanes]
    sent = sum(meter.bytes_sent for meter in meters)
    probe, node, aside = (sum(meter.bytes[phase] for meter in meters) for phase in ("probe", "node", "measurement"))
    coordinates = sum(meter.coordinates for meter in meters)
    between = coordinates - sum(meter.coordinates_node for meter in meters)
    expected = [lane.quality.expected() for lane in lanes]
    last = max((lane.quality.step for lane in lanes if lane.quality.step is not None), default=None)
    measured = [lane.quality for lane in lanes if last is not None and lane.quality.step == last]
    widths = sum((Counter(quality.widths) for quality in measured), Counter[int]())
    return Stats(
        steps=steps,
        all_reduces=sum(meter.all_reduces for meter in meters),
        bytes_sent=sent,
        bytes_agreement=sum(meter.bytes["agreement"] for meter in meters),
        bytes_probe=probe,
        bytes_node=node,
        bytes_statistics=sum(meter.bytes["statistics"] for meter in meters),
        bytes_gradient=sum(meter.bytes["gradient"] for meter in meters),
        bytes_measurement=aside,
        coordinates=coordinates,
        bits_per_coordinate=8 * (sent - probe) / coordinates if coordinates else 0.0,
        bits_between_nodes=8 * (sent - probe - node - aside) / between if between else 0.0,
        seconds_agreement=sum(meter.seconds("agreement") for meter in meters),
        seconds_node=sum(meter.seconds("node") for meter in meters),
        seconds_statistics=sum(meter.seconds("statistics") for meter in meters),
        seconds_codec=sum(meter.seconds("codec") for meter in meters),
        seconds_network=sum(meter.seconds("network") for meter in meters),
        seconds_exposed=seconds_exposed,
        seconds_hidden=seconds_hidden,
        predicted_vnmse=_ratio(sum(error for error, _ in expected), sum(energy for _, energy in expected)),
        measured_vnmse=_ratio(sum(q.error for q in measured), sum(q.energy for q in measured)),
        widths={width: count / widths.total() for width, count in sorted(widths.items())},
        backend=backend,
    )


def _ratio(error: float, energy: float) -> float | None:
    return error / energy if energy else None
