"""Moves bytes between ranks, and says in which order a multi-hop all-reduce needs them; knows no codec."""

from dynamiq_transport.agree import gather_records as gather_records
from dynamiq_transport.cost import Link as Link
from dynamiq_transport.cost import choose as choose
from dynamiq_transport.cost import explain as explain
from dynamiq_transport.cost import measure as measure
from dynamiq_transport.group import dedicated_group as dedicated_group
from dynamiq_transport.hierarchical import Hierarchical as Hierarchical
from dynamiq_transport.hierarchical import hierarchical as hierarchical
from dynamiq_transport.local import LocalTransport as LocalTransport
from dynamiq_transport.local import run_local as run_local
from dynamiq_transport.schedules import Schedule as Schedule
from dynamiq_transport.schedules import ScheduleFunction as ScheduleFunction
from dynamiq_transport.schedules import Step as Step
from dynamiq_transport.schedules import butterfly as butterfly
from dynamiq_transport.schedules import check_schedule as check_schedule
from dynamiq_transport.schedules import common_gain as common_gain
from dynamiq_transport.schedules import direct as direct
from dynamiq_transport.schedules import gain as gain
from dynamiq_transport.schedules import ring as ring
from dynamiq_transport.sub import Levels as Levels
from dynamiq_transport.sub import SubTransport as SubTransport
from dynamiq_transport.sub import levels as levels
from dynamiq_transport.torch_distributed import TorchTransport as TorchTransport
from dynamiq_transport.transport import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from dynamiq_transport.transport import Handle as Handle
from dynamiq_transport.transport import Message as Message
from dynamiq_transport.transport import Transport as Transport
from dynamiq_transport.transport import TransportError as TransportError
from dynamiq_transport.transport import check_batch as check_batch

__all__ = [
    "DEFAULT_TIMEOUT",
    "Handle",
    "Hierarchical",
    "Levels",
    "Link",
    "LocalTransport",
    "Message",
    "Schedule",
    "ScheduleFunction",
    "Step",
    "SubTransport",
    "TorchTransport",
    "Transport",
    "TransportError",
    "butterfly",
    "check_batch",
    "check_schedule",
    "choose",
    "common_gain",
    "dedicated_group",
    "direct",
    "explain",
    "gain",
    "gather_records",
    "hierarchical",
    "levels",
    "measure",
    "ring",
    "run_local",
]
