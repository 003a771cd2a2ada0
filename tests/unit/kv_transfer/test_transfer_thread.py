import itertools
import threading

import pytest

from twinpool.kv_transfer.transfer_thread import TransferThread

WAIT_S = 10.0


def no_error(error: Exception) -> None:
    raise AssertionError from error


def test_posted_actions_run_in_order_on_the_thread() -> None:
    seen: list[tuple[int, str]] = []
    done = threading.Event()
    thread = TransferThread("transfer", lambda now: None, no_error)
    thread.start()
    for i in range(100):
        thread.post(lambda i=i: seen.append((i, threading.current_thread().name)))
    thread.post(done.set)
    assert done.wait(WAIT_S)
    assert seen == [(i, "transfer") for i in range(100)]
    assert thread.stop(WAIT_S)


def test_a_far_deadline_does_not_end_the_thread() -> None:
    ticked, done = threading.Event(), threading.Event()

    def tick(now: float) -> float:
        ticked.set()
        return now + 1e30

    thread = TransferThread("transfer", tick, no_error)
    thread.start()
    thread.wake()
    assert ticked.wait(WAIT_S)
    thread.post(done.set)
    assert done.wait(WAIT_S)
    assert thread.stop(WAIT_S)


def test_an_idle_thread_is_not_ticked_until_woken() -> None:
    ticks: list[float] = []
    ticked = threading.Semaphore(0)

    def tick(now: float) -> float | None:
        ticks.append(now)
        ticked.release()
        return None

    thread = TransferThread("transfer", tick, no_error)
    thread.start()
    assert not ticked.acquire(timeout=0.1)
    thread.wake()
    assert ticked.acquire(timeout=WAIT_S)
    assert not ticked.acquire(timeout=0.1)
    assert thread.stop(WAIT_S)
    assert len(ticks) == 1


def test_a_tick_comes_again_when_it_asked_to() -> None:
    enough = threading.Event()
    times: list[float] = []

    def tick(now: float) -> float | None:
        times.append(now)
        if len(times) == 20:
            enough.set()
            return None
        return now + 0.0005

    thread = TransferThread("transfer", tick, no_error)
    thread.start()
    thread.wake()
    assert enough.wait(WAIT_S)
    assert thread.stop(WAIT_S)
    assert all(later - earlier >= 0.0005 for earlier, later in itertools.pairwise(times))


def test_exceptions_are_reported_and_the_thread_goes_on() -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def tick(now: float) -> float | None:
        if not errors:
            raise RuntimeError("tick")
        return None

    def fail() -> None:
        raise RuntimeError("action")

    thread = TransferThread("transfer", tick, errors.append)
    thread.start()
    thread.wake()
    thread.post(fail)
    thread.post(done.set)
    assert done.wait(WAIT_S)
    assert thread.stop(WAIT_S)
    assert {str(error) for error in errors} >= {"action"}


def test_stop_runs_what_was_posted_before() -> None:
    seen: list[int] = []
    thread = TransferThread("transfer", lambda now: None, no_error)
    thread.start()
    for i in range(10):
        thread.post(lambda i=i: seen.append(i))
    assert thread.stop(WAIT_S)
    assert seen == list(range(10))
    assert thread.stop(WAIT_S)


@pytest.mark.filterwarnings("error")
def test_stop_before_anything_happened() -> None:
    thread = TransferThread("transfer", lambda now: None, no_error)
    thread.start()
    assert thread.stop(WAIT_S)
