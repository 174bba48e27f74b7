"""The schedule that is chosen by measured numbers: measured once, chosen alike on all ranks, by the message's size."""

import logging

import pytest
import torch

from dynamiq_core import CodecConfig, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import CommunicationError, ConfigMismatchError, DynamiQState, Meter, all_reduce, simulate
from dynamiq_ddp.exact import Exact
from dynamiq_ddp.probe import bytes_of, known_link, remember
from dynamiq_transport import Link, LocalTransport, butterfly, choose, direct, gain, hierarchical

CPU = torch.device("cpu")


class Told(BF16):
    """Notes for which gain each plan was made, and so for which schedule."""

    def __init__(self):
        self.gains = []

    def plan(self, statistics, numel, **others):
        if others["workers"] > 1:
            self.gains.append(others["gain"])
        return super().plan(statistics, numel, **others)


def test_chosen_by_the_size_of_the_message(ranks):
    link = Link(latency=10e-6, overhead=9e-6, bandwidth=1e9)
    assert choose(2e3, 8, link) is butterfly
    assert choose(2e6, 8, link) is direct  # 48 us of latency are less than 2 % of 3.5 ms

    def work(transport):
        remember(transport, link)
        codec = Told()
        for size in (1000, 1_000_000):
            all_reduce(torch.ones(size), transport=transport, codec=codec, schedule="auto")
        return codec.gains

    assert ranks(8, work) == [[gain(butterfly, 8), gain(direct, 8)]] * 8


def test_measured_once_for_a_transport_and_counted_apart(ranks, recorder, random_rows, same_bits, caplog):
    rows = random_rows(3, 5000)

    def work(transport):
        recorded, meters, results = recorder(transport), [Meter(), Meter()], []
        for step, meter in enumerate(meters):
            row = rows[transport.rank].clone()
            results.append(
                all_reduce(row, transport=recorded, codec=DynamiQ(), schedule="auto", step=step, meter=meter)
            )
        return known_link(recorded), meters, sum(size for _, size in recorded.sent), results

    with caplog.at_level(logging.INFO, logger="dynamiq_ddp"):
        found = ranks(3, work)
    link = found[0][0]
    assert all(latency > 0 for latency in (link.latency, link.bandwidth))
    for known, (first, second), sent, results in found:
        assert known == link  # the same numbers on every rank
        assert first.bytes["probe"] > 0 == second.bytes["probe"]
        assert first.bytes_sent + second.bytes_sent == sent
        for step, result in enumerate(results):
            schedule = choose(bytes_of(DynamiQ(), 5000, CPU), 3, link)
            assert same_bits(result, simulate(rows, codec=DynamiQ(), schedule=schedule, step=step).mean)
    tables = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    assert len(tables) == 1  # of rank 0
    assert all(word in tables[0] for word in ("3 ranks, latency", "direct", "butterfly", "ring", "chosen"))


def test_bytes_of_a_message():
    assert bytes_of(BF16(), 1000, CPU) == 2000
    assert bytes_of(Exact(torch.float64), 1000, CPU) == 8000
    assert bytes_of(DynamiQ(CodecConfig(bits=4.0)), 10**6, CPU) == pytest.approx(1e6 * (4.0 - 0.125) / 8, rel=0.01)


def test_ranks_that_do_not_all_measure_disagree(ranks):
    def work(transport):
        tensor = torch.full((50,), float(transport.rank))
        schedule = "auto" if transport.rank == 1 else "ring"
        with pytest.raises(ConfigMismatchError) as caught:
            all_reduce(tensor, transport=transport, codec=BF16(), schedule=schedule)
        assert (tensor == transport.rank).all()
        return caught.value.differences["schedule"]

    held = ranks(3, work)
    assert held[0] == held[1] == held[2]
    assert held[0][0] == held[0][2] != held[0][1]
    assert "'auto'" in held[0][1]


def test_a_rank_that_does_not_come_to_measure(ranks):
    def work(transport):
        if transport.rank == 1:
            return None
        with pytest.raises(CommunicationError) as caught:
            all_reduce(torch.ones(50), transport=transport, codec=BF16(), schedule="auto", check=False, step=4)
        return caught.value.step, caught.value.peers

    assert ranks(2, work, timeout=0.3)[0] == (4, (1,))


@pytest.mark.parametrize("schedule", ["auto", hierarchical(2, between="auto")])
def test_a_simulation_measures_once_in_a_process(schedule, random_rows, same_bits, caplog):
    rows = random_rows(4, 3000)
    with caplog.at_level(logging.INFO, logger="dynamiq_ddp"):
        results = [simulate(rows, codec=BF16(), schedule=schedule) for _ in range(3)]
    assert len(caplog.records) <= 1
    assert all(same_bits(result.mean, results[0].mean) for result in results)
    assert (results[0].bytes_sent < 100_000).all()  # the measurement is not among them


def test_a_state_measures_at_first_use(ranks, random_rows):
    rows = random_rows(4, 50_000)
    groups = [LocalTransport.group(4) for _ in range(2)]

    def work(outer):
        mine = iter(groups)
        state = DynamiQState(schedule="auto", backend="reference", transport=lambda: next(mine)[outer.rank], lanes=2)
        results, probes = [], []
        for _ in range(2):
            buckets = [state.begin(rows[outer.rank].clone(), index=index) for index in range(2)]
            results += [bucket.wait() for bucket in buckets]
            probes.append(state.stats().bytes_probe)
        links = [known_link(lane.transport) for lane in state._lanes.lanes]
        stats = state.stats()
        state.close()
        return results, probes, links, stats

    found = ranks(4, work)
    for results, probes, links, stats in found:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
        assert links == found[0][2]
        assert links[0] == links[1]
        assert probes[0] == probes[1] > 0
        assert stats.bytes_sent - stats.bytes_probe < 4 * 50_000
        assert 4.8 < stats.bits_per_coordinate <= 5.0
