"""A schedule of two levels is a value: it can be compared, hashed, printed and sent to another process."""

from __future__ import annotations

import pickle

from dynamiq_transport import Hierarchical, hierarchical, ring


def test_it_is_a_value() -> None:
    schedule = hierarchical(8, between="butterfly")
    assert schedule == Hierarchical(8, "butterfly")
    assert schedule == pickle.loads(pickle.dumps(schedule))
    assert len({schedule, hierarchical(8, between="butterfly"), hierarchical(8)}) == 2
    assert repr(schedule) == "hierarchical(8, between='butterfly')"
    assert repr(hierarchical(2, between=ring)) == "hierarchical(2, between=ring)"
    assert pickle.loads(pickle.dumps(hierarchical(2, between=ring))).between is ring
    assert repr(hierarchical(2, between=hierarchical(4))) == "hierarchical(2, between=hierarchical(4, between='ring'))"
