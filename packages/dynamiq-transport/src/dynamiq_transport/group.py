"""A process group of one's own beside the user's, over the same ranks.

``torch.distributed.new_group`` names groups by counters that must be equal on all ranks of the *world*, so it has to be
called by all of them, and members of a subgroup cannot use it on their own whatever the rest of the world does. Here
only the members take part: the group finds its peers through the store of its parent, under a number that each rank
takes from that store.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dynamiq_transport.transport import TransportError, check_timeout

_NAME = "dynamiq_transport"
_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}


def dedicated_group(parent: dist.ProcessGroup, *, timeout: float) -> dist.ProcessGroup:
    """Make a new process group over the ranks of ``parent``, with the same rank numbers and kind of backend.

    All members of ``parent`` call it, and no other rank; several calls make several groups, in the same order on all
    ranks. The group is not in torch's table of groups: it ends when the last reference is dropped, and
    ``destroy_process_group`` does not know it.

    Args:
        parent: an initialised group with Gloo or NCCL backends, of which this process is a member.
        timeout: seconds to wait for the other ranks, and the time-out of the group's operations.

    Raises:
        ValueError: the parent has another kind of backend.
        TransportError: the other ranks did not come, or the network interface cannot be used.
    """
    limit = timedelta(seconds=check_timeout(timeout))
    rank, size = parent.rank(), parent.size()
    root = PrefixStore(_NAME, parent.get_group_store())
    number = root.add(f"groups of rank {rank}", 1)
    store = PrefixStore(f"group {number}", root)
    group = dist.ProcessGroup(store, rank, size)
    made: dict[str, dist.ProcessGroupGloo | dist.ProcessGroupNCCL] = {}
    for device in parent._device_types:
        kind = parent._get_backend(device).name().lower()
        if kind not in made:
            try:
                made[kind] = _backend(kind, PrefixStore(kind, store), rank, size, limit)
            except RuntimeError as error:
                raise TransportError(
                    f"rank {rank} of {size} could not make a {kind} group within {timeout:g} s: {error}. "
                    "GLOO_SOCKET_IFNAME, if set, is the name of an interface such as eth0 or lo, not an address."
                ) from error
        group._register_backend(device, _TYPES[kind], made[kind])
    if "nccl" in made:
        _meet(store, rank, size, limit)
    group._set_default_backend(_TYPES["nccl" if "nccl" in made else "gloo"])
    return group


def _backend(
    kind: str, store: Store, rank: int, size: int, limit: timedelta
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        options.is_high_priority_stream = True  # peers wait for these messages, and nobody for a kernel beside them
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"no dedicated group for backend {kind}; allowed: gloo, nccl, or both")


def _meet(store: Store, rank: int, size: int, limit: timedelta) -> None:
    """Wait until all ranks have come.

    Gloo connects them when a group is made. NCCL does so in the first operation, which knows no time-out until then: a
    rank that has stalled would leave the others waiting for ever.

    Raises:
        TransportError: some did not come in time.
    """
    store.set(f"rank {rank}", "here")
    try:
        store.wait([f"rank {other}" for other in range(size)], limit)
    except RuntimeError as error:
        missing = tuple(other for other in range(size) if not store.check([f"rank {other}"]))
        raise TransportError(
            f"rank {rank} of {size} could not make an nccl group: rank {', '.join(map(str, missing))} did not come "
            f"within {limit.total_seconds():g} s",
            missing,
        ) from error
