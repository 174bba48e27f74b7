"""DynamiQ for data-parallel training: the compressed all-reduce, and the communication hook for DDP."""

from .engine import all_reduce as all_reduce
from .errors import CommunicationError as CommunicationError
from .errors import ConfigMismatchError as ConfigMismatchError
from .errors import ReplicaError as ReplicaError
from .meter import Meter as Meter
from .simulate import SimulationResult as SimulationResult
from .simulate import simulate as simulate

__all__ = [
    "CommunicationError",
    "ConfigMismatchError",
    "Meter",
    "ReplicaError",
    "SimulationResult",
    "all_reduce",
    "simulate",
]
