from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue

from dynamiq_transport.worker import Worker


class Noted:
    """An action that leaves its number and its thread."""

    def __init__(self, number: int, notes: SimpleQueue[tuple[int, threading.Thread]]) -> None:
        self.number, self.notes = number, notes

    def __call__(self) -> None:
        self.notes.put((self.number, threading.current_thread()))


def test_actions_are_done_in_order_by_one_thread_that_ends() -> None:
    worker, notes = Worker("test worker"), SimpleQueue[tuple[int, threading.Thread]]()
    for number in range(100):
        worker.submit(Noted(number, notes))
    worker.stop(patience=30.0)
    worker.stop()
    done = [notes.get() for _ in range(100)]
    assert [number for number, _ in done] == list(range(100))
    (thread,) = {thread for _, thread in done}
    assert thread.name == "test worker"
    assert not thread.is_alive()


def test_the_first_actions_may_come_from_several_threads() -> None:
    for _ in range(20):
        worker, notes = Worker("test worker"), SimpleQueue[tuple[int, threading.Thread]]()
        met = threading.Barrier(4)

        def submit(number: int, worker: Worker = worker, met: threading.Barrier = met, notes=notes) -> None:  # type: ignore[no-untyped-def]
            met.wait(30.0)
            worker.submit(Noted(number, notes))

        callers = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        done = [notes.get(timeout=30.0) for _ in callers]
        assert {number for number, _ in done} == set(range(4))
        assert len({thread for _, thread in done}) == 1


def test_a_worker_that_nobody_has_ends_and_keeps_nothing() -> None:
    worker, notes = Worker("test worker"), SimpleQueue[tuple[int, threading.Thread]]()
    action = Noted(0, notes)
    kept = weakref.ref(action)
    worker.submit(action)
    _, thread = notes.get(timeout=30.0)
    del action
    for _ in range(3000):  # the thread may be just about to let go of it
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None
    del worker
    thread.join(30.0)
    assert not thread.is_alive()
