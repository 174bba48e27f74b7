"""The communication hook: what DistributedDataParallel calls for every bucket of gradients.

Annotations stay real objects here, since DDP compares them with what it expects.
"""

import torch
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, from where its type is known

from dynamiq_core import InputError

from .state import DynamiQState


def dynamiq_hook(state: DynamiQState, bucket: GradBucket, *others: object) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks with few bits per coordinate, beside the rest of the backward pass.

    Register it once, before the first backward pass::

        model = DistributedDataParallel(model)
        model.register_comm_hook(DynamiQState(bits=5.0), dynamiq_hook)

    Args:
        state: made by the user, one for each model; keeps everything that lasts longer than a bucket.
        bucket: the gradients, as DDP hands them over.
        others: none by DDP. FSDP hands its hooks a third argument, which is refused like its tensors.

    Returns:
        A future of the mean, in the bucket's dtype, with the same bits on every rank.

    Raises:
        InputError: the arguments are something else, for instance those that FSDP hands to its hooks, or DDP without
            buckets, as with ``torch.compile`` in its mode ``"python_reducer"``.
        DynamiQError: something went wrong with an earlier bucket, or while this one was begun.
    """
    if others or not isinstance(bucket, GradBucket):
        given = " with ".join(type(argument).__name__ for argument in (bucket, *others))
        raise InputError(
            f"dynamiq_hook cannot average a {given}; allowed: a bucket of DistributedDataParallel, through its "
            "register_comm_hook. FSDP shards gradients and has hooks of another kind; DDP itself hands over single "
            "gradients if torch._dynamo.config.optimize_ddp is 'python_reducer' (allowed: 'ddp_optimizer')."
        )
    if not isinstance(state, DynamiQState):
        raise InputError(f"the state of dynamiq_hook cannot be a {type(state).__name__}; allowed: a DynamiQState")
    return state.begin(bucket.buffer(), index=bucket.index(), parameters=bucket.parameters())
