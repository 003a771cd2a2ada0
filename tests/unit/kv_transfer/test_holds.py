from dataclasses import dataclass, field

import pytest

from twinpool.kv_transfer.holds import MAX_PUMP_INTERVAL_S, HoldLimits, HoldTable
from twinpool.kv_transfer.messages import Abandon, Done, Final, First, FromPrefill, Gone, Open, Released, Segment
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S


@dataclass
class Event:
    ready: bool = True

    def query(self) -> bool:
        return self.ready


@dataclass
class World:
    now: float = 1000.0
    sent: list[tuple[str, FromPrefill]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    wakes: int = 0

    def __post_init__(self) -> None:
        self.holds = HoldTable(
            HoldLimits(open_timeout_s=10, hold_timeout_s=60, unknown_open_s=2, expect_timeout_s=300, tombstone_s=100),
            lambda peer, message: self.sent.append((peer, message)),
            self.ended.append,
            self.wake,
            lambda: self.now,
        )
        self.holds.session_began("d")
        self.holds.session_began("e")

    def wake(self) -> None:
        self.wakes += 1

    def take(self) -> list[FromPrefill]:
        messages = [message for _, message in self.sent]
        self.sent.clear()
        return messages

    def later(self, seconds: float) -> float | None:
        self.now += seconds
        return self.holds.poll(self.now)

    def announced(self, transfer_id: int = 1, opened: bool = True) -> None:
        """A hold of two blocks with everything announced, and Final."""
        if opened:
            self.holds.receive("d", Open(transfer_id))
        self.holds.begin(transfer_id, 2)
        self.holds.announce(transfer_id, 0, [4, 5], 0, 8, Event())
        self.holds.final(transfer_id, 7, [FIRST])


FIRST = First(0, 42)
SEGMENT = Segment(1, 0, 0, (4, 5), 0, 8)
FINAL = Final(1, 7, (FIRST,))


@pytest.fixture
def world() -> World:
    return World()


def test_segments_go_out_as_they_come_and_done_releases_once(world: World) -> None:
    world.announced()
    assert world.take() == [SEGMENT, FINAL]
    assert world.holds.pump_interval(world.now) is not None
    assert world.holds.stats.held_blocks == 2
    world.holds.receive("d", Done(1))
    assert world.take() == [Released(1, True)]
    assert world.ended == [1]
    assert world.holds.pump_interval(world.now) is None
    assert world.holds.stats.open == 0
    world.holds.receive("d", Done(1))
    assert world.take() == [Gone(1, "already released")]
    assert world.ended == [1]


def test_what_was_announced_before_open_waits_for_it_and_merges(world: World) -> None:
    world.holds.begin(1, 4)
    for block in range(4):
        world.holds.announce(1, block, [10 + block], 0, 8, Event())
    assert world.take() == []
    assert world.holds.pump_interval(world.now) is None
    world.holds.receive("d", Open(1))
    assert world.take() == [Segment(1, 0, 0, (10, 11, 12, 13), 0, 8)]
    assert world.holds.pump_interval(world.now) is not None


def test_progress_is_made_less_often_the_longer_nothing_new_is_readable(world: World) -> None:
    world.announced()
    assert world.holds.pump_interval(world.now) == PUMP_INTERVAL_S
    assert world.holds.pump_interval(world.now + 0.016) == pytest.approx(0.001)
    assert world.holds.pump_interval(world.now + 10) == MAX_PUMP_INTERVAL_S
    world.now += 10
    world.holds.announce(1, 2, [6], 0, 8, Event())
    assert world.holds.pump_interval(world.now) == PUMP_INTERVAL_S


def test_segments_wait_for_their_events_and_final_for_all_of_them(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    event = Event(ready=False)
    world.holds.announce(1, 0, [4, 5], 0, 8, event)
    world.holds.final(1, 7, [FIRST])
    assert world.holds.poll(world.now) == pytest.approx(world.now + PUMP_INTERVAL_S)
    assert world.take() == []
    event.ready = True
    assert world.holds.poll(world.now) == world.now + 60
    assert world.take() == [SEGMENT, FINAL]


def test_revoke_comes_before_done_then_nothing_is_confirmed(world: World) -> None:
    world.announced()
    world.take()
    world.holds.revoke(1, "cancelled")
    world.holds.revoke(1, "again")
    assert world.take() == [Gone(1, "cancelled")]
    world.holds.receive("d", Done(1))
    assert world.take() == [Gone(1, "cancelled")]
    assert world.ended == []


def test_revoke_after_done_changes_nothing(world: World) -> None:
    world.announced()
    world.holds.receive("d", Done(1))
    world.take()
    world.holds.revoke(1, "cancelled")
    assert world.take() == []
    assert world.ended == [1]


def test_done_before_final_is_confirmed_with_it(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    world.take()
    world.holds.receive("d", Done(1))
    assert world.holds.pump_interval(world.now) is None
    assert world.take() == []
    assert world.ended == []
    world.holds.announce(1, 2, [6], 0, 8, Event())
    assert world.take() == [], "nobody will read it"
    world.holds.final(1, 7, [FIRST])
    assert world.take() == [FINAL, Released(1, True)]
    assert world.ended == [1]
    assert world.holds.stats.open == 0


def test_final_that_waits_for_a_kernel_confirms_when_it_goes_out(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    world.holds.receive("d", Done(1))
    event = Event(ready=False)
    world.holds.announce(1, 2, [6], 0, 8, event)
    world.holds.final(1, 7, [FIRST])
    world.take()
    event.ready = True
    world.holds.poll(world.now)
    assert world.take() == [FINAL, Released(1, True)]
    assert world.ended == [1]


def test_a_revocation_after_an_early_done_confirms_nothing(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    world.holds.receive("d", Done(1))
    world.take()
    world.holds.revoke(1, "cancelled")
    world.holds.final(1, 7, [FIRST])
    assert world.take() == [Gone(1, "cancelled")]
    assert world.ended == []


def test_done_before_the_prompt_was_admitted_is_refused(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.expect(1)
    world.holds.receive("d", Done(1))
    assert world.take() == [Gone(1, "Done came before any segment")]
    assert world.ended == []


def test_an_unknown_open_waits_two_seconds(world: World) -> None:
    world.holds.receive("d", Open(1))
    assert world.later(1.5) == world.now + 0.5
    assert world.take() == []
    world.later(0.5)
    assert world.take() == [Gone(1, "unknown exchange")]


def test_an_expected_open_waits_for_admission(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.expect(1)
    world.holds.expect(2)
    world.holds.receive("d", Open(2))
    world.later(250)
    assert world.take() == []
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    assert world.take() == [SEGMENT]
    world.later(51)
    assert world.take() == [Gone(2, "not admitted before its deadline")]
    assert world.ended == []


def test_a_refused_submit_answers_its_open(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.refuse(1, "too long")
    world.holds.refuse(2, "too long")
    world.holds.receive("d", Open(2))
    assert world.take() == [Gone(1, "too long"), Gone(2, "too long")]
    assert world.ended == []


def test_tombstones_answer_until_their_deadline(world: World) -> None:
    world.holds.refuse(1, "too long")
    world.later(99)
    world.holds.receive("d", Open(1))
    assert world.take() == [Gone(1, "too long")]
    world.later(2)
    world.holds.receive("d", Open(1))
    assert world.take() == []


def test_a_hold_that_nobody_opens_ends(world: World) -> None:
    world.announced(opened=False)
    assert world.later(9.5) == world.now + 0.5
    assert world.ended == []
    world.later(0.5)
    assert world.ended == [1]
    world.holds.receive("d", Open(1))
    assert world.take() == [Gone(1, "not opened within 10 s (transport.open_timeout_s)")]


def test_a_hold_that_is_not_read_ends(world: World) -> None:
    world.announced()
    world.take()
    world.later(59)
    assert world.ended == []
    world.later(1)
    assert world.ended == [1]
    assert world.take() == [Gone(1, "not read within 60 s (transport.hold_timeout_s)")]
    assert world.holds.pump_interval(world.now) is None


@pytest.mark.parametrize("opened_late", [False, True])
def test_a_long_prefill_is_no_silence(world: World, opened_late: bool) -> None:
    """One chunk may take longer than a hold may last; and an idle wait asks for no poll."""
    if not opened_late:
        world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.receive("d", Open(1))
    for layer in range(8):
        assert world.later(5000) is None
        world.holds.announce(1, 0, [4, 5], layer, layer + 1, Event())
    assert world.ended == []
    world.holds.final(1, 7, [FIRST])
    assert world.later(59) == world.now + 1
    world.later(1)
    assert world.ended == [1]


@pytest.mark.parametrize("how", ["abandon", "session"])
def test_the_decode_worker_leaves(world: World, how: str) -> None:
    world.announced()
    world.take()
    if how == "abandon":
        world.holds.receive("d", Abandon(1))
    else:
        world.holds.session_ended("d")
    assert world.take() == []
    assert world.ended == [1]
    assert world.holds.pump_interval(world.now) is None
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    world.holds.final(1, 7, [FIRST])
    assert world.take() == []


@pytest.mark.parametrize("how", ["abandon", "session"])
def test_leaving_before_begin_ends_the_hold_as_it_begins(world: World, how: str) -> None:
    world.holds.expect(1)
    world.holds.receive("d", Open(1))
    if how == "abandon":
        world.holds.receive("d", Abandon(1))
    else:
        world.holds.session_ended("d")
    assert world.ended == []
    world.holds.begin(1, 2)
    assert world.ended == [1]
    assert world.holds.stats.open == 0


def test_another_peer_gets_nothing(world: World) -> None:
    world.announced()
    world.take()
    world.holds.receive("e", Open(1))
    world.holds.receive("e", Done(1))
    world.holds.receive("e", Abandon(1))
    assert [(peer, type(message)) for peer, message in world.sent] == [("e", Gone), ("e", Gone)]
    assert world.ended == []
    world.holds.session_ended("e")
    world.take()
    world.holds.receive("d", Done(1))
    assert world.take() == [Released(1, True)]


def test_a_peer_without_session_is_not_heard(world: World) -> None:
    world.holds.session_ended("d")
    world.announced()
    assert world.take() == []
    assert world.holds.pump_interval(world.now) is None


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_that_ends_with_its_first_token_is_not_held(world: World, late: bool) -> None:
    if not late:
        world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    final = Final(1, 7, (First(0, 42, "stop"), First(1, 43, "length")))
    world.holds.final(1, 7, final.first_tokens)
    assert world.holds.stats.held_blocks == 0
    if late:
        world.holds.receive("d", Open(1))
    assert world.take() == ([final] if late else [SEGMENT, final])
    world.holds.revoke(1, "freed")
    world.holds.receive("d", Done(1))
    assert world.take() == [Gone(1, "finished on the prefill worker")]
    world.later(1000)
    assert world.ended == []
    assert world.holds.stats.open == 0


def test_one_finished_choice_of_two_is_held(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 2)
    world.holds.announce(1, 0, [4, 5], 0, 8, Event())
    world.holds.final(1, 7, [First(0, 42, "stop"), First(1, 43)])
    assert world.holds.stats.held_blocks == 2
    world.holds.receive("d", Done(1))
    assert world.ended == [1]


def test_reads_outside_holds_keep_the_source_awake(world: World) -> None:
    world.holds.receive("d", Open(0))
    world.holds.receive("e", Open(0))
    assert world.holds.pump_interval(world.now) is not None
    world.holds.receive("d", Done(0))
    assert world.holds.pump_interval(world.now) is not None
    world.holds.session_ended("e")
    assert world.holds.pump_interval(world.now) is None
    assert world.take() == []


def test_an_idle_table_asks_for_nothing(world: World) -> None:
    world.announced()
    world.holds.receive("d", Done(1))
    assert world.holds.poll(world.now) is None
    assert world.wakes > 0


def test_long_segments_are_split(world: World) -> None:
    world.holds.receive("d", Open(1))
    world.holds.begin(1, 20_000)
    world.holds.announce(1, 0, range(20_000), 0, 8, Event())
    parts = [message for message in world.take() if isinstance(message, Segment)]
    assert [part.first_block for part in parts] == [0, 8192, 16384]
    assert [block for part in parts for block in part.block_ids] == list(range(20_000))
