"""What a lane does on CUDA, by the calls that it makes: streams that only note who waits for whom."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynamiq_core import InputError
from dynamiq_ddp.lanes import Lanes
from dynamiq_transport import LocalTransport


@pytest.fixture
def log(monkeypatch):
    """What is called, in order, in a world of two CUDA devices."""
    said = []

    class Stream:
        def __init__(self, device, priority=0, name="lane"):
            self.name = f"{name} {torch.device(device).index}"
            said.append(f"new {self.name}, priority {priority}")

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    class Future:
        def __init__(self, devices):
            said.append(f"future on {devices[0]}")

        def set_result(self, value):
            said.append("result")

    @contextlib.contextmanager
    def on(stream):
        said.append(f"on {stream.name}")
        yield
        said.append(f"off {stream.name}")

    current = {i: Stream(f"cuda:{i}", name="backward") for i in range(2)}
    said.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device.index])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("dynamiq_ddp.lanes.Future", Future)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: said.append(f"{tuple(x.shape)} used on {stream.name}")
    )
    return said


@pytest.fixture
def lanes():
    with FakeTensorMode():
        lanes = Lanes([LocalTransport.group(1)[0]])
        yield lanes
        lanes.close()


def test_a_lane_follows_the_backward_pass_and_has_a_stream_for_each_device(log, lanes):
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        tensor = torch.empty(7, device=device)
        lanes.begin(0, lambda lane, tensor=tensor: log.append("work") or tensor, tensor)
    expected = []
    for device, new in ((0, True), (1, True), (0, False)):
        expected += [f"new lane {device}, priority -1"] if new else []
        expected += [f"lane {device} waits for backward {device}", f"(7,) used on lane {device}"]
        expected += [f"future on cuda:{device}", f"on lane {device}", "work", "result", f"off lane {device}"]
    assert log == expected


def test_the_parts_of_a_sparse_gradient_are_kept_for_the_lane(log, lanes):
    """A sparse tensor itself has no memory of which that could be said."""
    tensor = torch.sparse_coo_tensor(
        torch.zeros(1, 3, dtype=torch.int64, device="cuda:0"),
        torch.empty(3, 5, device="cuda:0"),
        (9, 5),
        check_invariants=False,
    )
    lanes.begin(0, lambda lane: tensor, tensor)
    assert log[1:4] == ["lane 0 waits for backward 0", "(1, 3) used on lane 0", "(3, 5) used on lane 0"]


def test_after_an_error_the_backward_pass_waits_for_what_was_begun(log, lanes):
    def work(lane):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        lanes.begin(0, work, torch.empty(7, device="cuda:0"))
    assert log[-1] == "backward 0 waits for lane 0"
    with pytest.raises(KeyError, match="lost"):
        lanes.begin(0, work, torch.empty(7, device="cuda:0"))


def test_a_graph_cannot_be_captured(log, lanes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="captured into a CUDA graph"):
        lanes.begin(0, lambda lane: None, torch.empty(7, device="cuda:0"))
    assert log == []
    assert lanes.error is None
