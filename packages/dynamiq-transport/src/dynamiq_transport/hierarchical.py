"""A schedule of two levels, for clusters whose nodes hold several ranks each.

Inside a node every rank reduces 1/m of the gradient at full precision; ranks of equal index in their nodes reduce that
part between the nodes by another schedule, where compression pays; then the node gathers the finished parts as they
are. The links between the nodes carry 1/m of what they would carry otherwise, in m parallel all-reduces, and only what
they carry is quantised.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamiq_transport.schedules import ScheduleFunction


@dataclass(frozen=True)
class Hierarchical:
    """What `hierarchical` returns: a value to hand to an all-reduce. It can be compared and pickled.

    Attributes:
        node_size: ranks of a node m.
        between: the schedule between the nodes.
    """

    node_size: int
    between: str | ScheduleFunction | Hierarchical = "ring"

    def __repr__(self) -> str:
        between = getattr(self.between, "__name__", None) or repr(self.between)
        return f"hierarchical({self.node_size}, between={between})"


def hierarchical(node_size: int, *, between: str | ScheduleFunction | Hierarchical = "ring") -> Hierarchical:
    """Full precision inside nodes of ``node_size`` consecutive ranks, compressed between the nodes.

    Nothing is checked here: whether nodes fit depends on the number of ranks, which is known to the all-reduce alone.
    `levels` says which ranks belong together.

    Args:
        node_size: ranks of a node m, which has to divide the number of ranks. With 1 only the outer schedule is left,
            and with all ranks in one node the result is exact.
        between: the schedule of the m all-reduces between nodes: a name, a function, or another `hierarchical`, whose
            ranks are the nodes, for racks of nodes.
    """
    return Hierarchical(node_size, between)
