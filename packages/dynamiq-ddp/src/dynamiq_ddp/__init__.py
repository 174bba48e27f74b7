"""DynamiQ for data-parallel training: the compressed all-reduce, and the communication hook for DDP."""

from .engine import all_reduce as all_reduce
from .errors import CommunicationError as CommunicationError
from .errors import ConfigMismatchError as ConfigMismatchError
from .errors import ReplicaError as ReplicaError
from .hook import dynamiq_hook as dynamiq_hook
from .meter import Meter as Meter
from .simulate import SimulationResult as SimulationResult
from .simulate import simulate as simulate
from .state import DynamiQState as DynamiQState
from .stats import Stats as Stats

__all__ = [
    "CommunicationError",
    "ConfigMismatchError",
    "DynamiQState",
    "Meter",
    "ReplicaError",
    "SimulationResult",
    "Stats",
    "all_reduce",
    "dynamiq_hook",
    "simulate",
]
