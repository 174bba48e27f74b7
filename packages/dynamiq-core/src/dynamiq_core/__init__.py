"""The maths of DynamiQ: what is computed and what travels, on any device, without anything distributed."""

from dynamiq_core.config import GROUP, SUPER_GROUP, CodecConfig
from dynamiq_core.dynamiq import DynamiQ, Operations
from dynamiq_core.errors import BackendError, ConfigError, DynamiQError, InputError
from dynamiq_core.metrics import vnmse
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.protocol import Codec, Encoding, Plan, Received

__version__ = "0.1.0"

__all__ = [
    "GROUP",
    "SUPER_GROUP",
    "BackendError",
    "Codec",
    "CodecConfig",
    "ConfigError",
    "DynamiQ",
    "DynamiQError",
    "DynamiQPlan",
    "Encoding",
    "InputError",
    "Operations",
    "Plan",
    "Received",
    "vnmse",
]
