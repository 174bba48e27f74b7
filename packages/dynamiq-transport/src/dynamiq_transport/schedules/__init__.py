"""Multi-hop all-reduce as data: pure functions of rank and size, and the proof that they are right."""

from dynamiq_transport.schedules.butterfly import butterfly as butterfly
from dynamiq_transport.schedules.direct import direct as direct
from dynamiq_transport.schedules.ring import ring as ring
from dynamiq_transport.schedules.schedule import Schedule as Schedule
from dynamiq_transport.schedules.schedule import ScheduleFunction as ScheduleFunction
from dynamiq_transport.schedules.schedule import Step as Step
from dynamiq_transport.schedules.trace import Encoding as Encoding
from dynamiq_transport.schedules.trace import check_schedule as check_schedule
from dynamiq_transport.schedules.trace import common_gain as common_gain
from dynamiq_transport.schedules.trace import encodings as encodings
from dynamiq_transport.schedules.trace import gain as gain

__all__ = [
    "Encoding",
    "Schedule",
    "ScheduleFunction",
    "Step",
    "butterfly",
    "check_schedule",
    "common_gain",
    "direct",
    "encodings",
    "gain",
    "ring",
]
