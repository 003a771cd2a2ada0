"""Prefill side of the exchange: who may read which blocks, and until when.

Life cycle of a hold:

1. ``expect`` (asyncio, when the Submit arrives): the id is known; an Open for it waits. Without it an Open waits at
   most ``unknown_open_s`` for ``begin``.
2. ``begin`` (engine, at admission): HELD; the request owns the blocks. ``announce`` adds segments, each readable once
   its event says so; they are kept until a decode worker has sent ``Open``, then sent. ``final`` ends the
   announcements.
3. It ends, once, in one of these ways, and leaves a tombstone that answers later messages with Gone:
   - ``Done`` of the peer that joined: HELD to RELEASED, answered ``Released(valid=True)``; ``ended`` is called and the
     engine frees the blocks. A peer that has read all before the first token is sampled says so at once; then Final
     and Released go out together, and the confirmation costs no round trip.
   - ``Abandon``, the end of the peer's session, or silence (``open_timeout_s`` from ``begin`` without Open,
     ``hold_timeout_s`` from Open or Final, the later one, without Done): HELD to REVOKED; ``ended`` is called. While
     the prompt is computed a peer that has joined waits as long as it takes: request deadline and session bound that.
   - ``revoke`` (engine): HELD to REVOKED; ``ended`` is not called: the caller frees.
   - ``final`` in which every choice finished: nothing is worth confirming, so the engine frees the blocks at once and
     ``ended`` is not called. The Final itself is kept for a peer that opens late, for ``open_timeout_s``.

The transition out of HELD is one compare-and-set under the lock: either the peer got its confirmation while nobody
could have reused the blocks, or the blocks were revoked first and no confirmation is ever given.

transfer_id 0 is reserved: ``Open(0)`` says that reads of the peer are pending outside any hold (a warm-up, a cancelled
exchange that drains), ``Done(0)`` that there are none left. They count as readers and are not answered.

Threads: engine (begin, announce, final, refuse, revoke), asyncio (expect, session_began, session_ended, receive),
transfer (poll). ``send`` and ``ended`` are called with the lock held, on whichever thread caused them, so that the
order of one exchange's messages is the order of events: they must only enqueue, and never call back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from twinpool.kv_transfer.hold import Hold, HoldLimits, HoldState, HoldStats, ReadyEvent
from twinpool.kv_transfer.messages import (
    LINK_TRANSFER_ID,
    Abandon,
    Done,
    Final,
    First,
    FromPrefill,
    Gone,
    Open,
    Released,
    Segment,
)
from twinpool.kv_transfer.segments import merge_segments, split_segment
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S

__all__ = ["HoldLimits", "HoldStats", "HoldTable", "ReadyEvent"]

PUMP_SHARE = 16
"""A wait for progress lengthens a read by at most one part in this."""
MAX_PUMP_INTERVAL_S = 0.002
"""A reader may begin long after something became readable: its destination was full."""


class HoldTable:
    """All holds of one prefill worker; see the module's life cycle.

    ``send(peer, message)`` puts a message into the peer's session; ``ended(transfer_id)`` tells the engine that it may
    free; ``wake()`` asks for a ``poll`` (and pumping, see ``pump_interval``) on the transfer thread.
    """

    def __init__(
        self,
        limits: HoldLimits,
        send: Callable[[str, FromPrefill], None],
        ended: Callable[[int], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._send = send
        self._ended = ended
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: dict[int, Hold] = {}
        self._tombstones: dict[int, tuple[float, str]] = {}
        self._sessions: set[str] = set()
        self._draining_peers: set[str] = set()
        self._readers = 0
        self._readable_since = 0.0
        self._released = 0
        self._revoked = 0

    # Engine thread

    def begin(self, transfer_id: int, num_blocks: int) -> None:
        """The request owns ``num_blocks`` blocks; segments will follow.

        If the exchange has already ended (its decode worker left), ``ended`` is called at once.
        """
        with self._lock:
            if transfer_id in self._tombstones:
                self._ended(transfer_id)
                return
            hold = self._holds.get(transfer_id)
            if hold is None:
                hold = self._holds[transfer_id] = Hold(transfer_id, HoldState.HELD, 0.0)
            hold.state = HoldState.HELD
            hold.num_blocks = num_blocks
            self._extend(hold)
        self._wake()

    def announce(
        self,
        transfer_id: int,
        first_block: int,
        block_ids: Sequence[int],
        layer_start: int,
        layer_end: int,
        event: ReadyEvent,
        rank: int = 0,
    ) -> None:
        """Layers ``[layer_start, layer_end)`` of the blocks from index ``first_block`` may be read after ``event``."""
        segment = Segment(transfer_id, rank, first_block, tuple(block_ids), layer_start, layer_end)
        with self._lock:
            hold = self._holds.get(transfer_id)
            if hold is None or hold.state is not HoldState.HELD:
                return
            if event.query():
                hold.unsent.append(segment)
                self._flush(hold)
            else:
                hold.unproven.append((segment, event))
        self._wake()

    def final(self, transfer_id: int, num_tokens: int, first_tokens: Sequence[First]) -> None:
        """Everything is announced. The hold waits for Done, or ends here if every choice finished (see the module)."""
        with self._lock:
            hold = self._holds.get(transfer_id)
            if hold is None or hold.state is not HoldState.HELD:
                return
            hold.final = Final(transfer_id, num_tokens, tuple(first_tokens))
            if all(first.finish for first in first_tokens):
                hold.state = HoldState.FINISHED
                hold.unproven.clear()
                hold.unsent.clear()
                hold.num_blocks = 0
                self._extend(hold)
            elif hold.peer is not None:
                self._extend(hold)
            self._flush(hold)
        self._wake()

    def refuse(self, transfer_id: int, reason: str) -> None:
        """The attempt was refused before ``begin``; its Open is answered Gone."""
        self.revoke(transfer_id, reason)

    def revoke(self, transfer_id: int, reason: str) -> None:
        """After return no confirmation can be given, so the caller may free the blocks. Idempotent."""
        with self._lock:
            hold = self._holds.get(transfer_id)
            if hold is not None and hold.state is HoldState.FINISHED:
                return
            if hold is not None:
                self._end(hold, HoldState.REVOKED, reason)
            elif transfer_id not in self._tombstones:
                self._bury(transfer_id, reason)
        self._wake()

    # Asyncio

    def expect(self, transfer_id: int, timeout_s: float | None = None) -> None:
        """The attempt's Submit arrived, ``begin`` will follow when it is admitted: its Open waits that long.

        Every expected id needs ``begin``, ``refuse`` or ``revoke``; ``timeout_s`` (None: ``expect_timeout_s``) is the
        backstop.
        """
        deadline = self._clock() + (self._limits.expect_timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            if transfer_id in self._tombstones:
                return
            hold = self._holds.get(transfer_id)
            if hold is None:
                self._holds[transfer_id] = Hold(transfer_id, HoldState.EXPECTED, deadline)
            elif hold.state is HoldState.OPENED:
                hold.state = HoldState.EXPECTED
                hold.deadline = deadline
        self._wake()

    def session_began(self, peer: str) -> None:
        """Messages of ``peer`` are taken from now on; ``peer`` is unique per session (worker id and epoch, say)."""
        with self._lock:
            self._sessions.add(peer)

    def session_ended(self, peer: str) -> None:
        """All holds that ``peer`` joined end; nothing is sent to it any more. Idempotent."""
        with self._lock:
            self._sessions.discard(peer)
            self._draining_peers.discard(peer)
            for hold in [hold for hold in self._holds.values() if hold.peer == peer]:
                if hold.state in (HoldState.OPENED, HoldState.EXPECTED):
                    # The engine has not begun it: the tombstone makes ``begin`` end at once.
                    self._end(hold, HoldState.REVOKED, "the decode worker's session ended")
                elif hold.state is HoldState.HELD:
                    self._end(hold, HoldState.REVOKED, "the decode worker's session ended")
                    self._ended(hold.transfer_id)
                else:
                    self._end(hold, HoldState.REVOKED, "finished on the prefill worker")
        self._wake()

    def receive(self, peer: str, message: Open | Done | Abandon) -> None:
        """Takes a message of ``peer``. Messages of a peer without session are ignored."""
        with self._lock:
            if peer not in self._sessions:
                return
            if message.transfer_id == LINK_TRANSFER_ID:
                if isinstance(message, Open):
                    self._draining_peers.add(peer)
                    self._readable_since = self._clock()
                else:
                    self._draining_peers.discard(peer)
            elif isinstance(message, Open):
                self._open(peer, message.transfer_id)
            else:
                self._leave(peer, message)
        self._wake()

    # Transfer thread

    def poll(self, now: float) -> float | None:
        """Sends segments whose events have become true and ends what has expired; returns when to be called again."""
        with self._lock:
            next_time: float | None = None
            for hold in list(self._holds.values()):
                if hold.unproven:
                    self._prove(hold)
                    if hold.transfer_id not in self._holds:
                        continue
                    if hold.unproven:
                        next_time = _earlier(next_time, now + PUMP_INTERVAL_S)
                if hold.deadline <= now:
                    self._expire(hold)
                elif hold.deadline < math.inf:
                    next_time = _earlier(next_time, hold.deadline)
            for transfer_id, (deadline, _) in list(self._tombstones.items()):
                if deadline > now:
                    # Insertion order is order of time; tombstones alone wake nobody.
                    break
                del self._tombstones[transfer_id]
            return next_time

    def pump_interval(self, now: float) -> float | None:
        """Seconds until the connector needs progress again, None while nobody may be reading from us; any thread.

        It grows with the time since something became readable: a read that has taken long suffers little from one
        more wait, and each turn takes the interpreter from the thread that computes the rest of the prompt.
        """
        if not (self._readers or self._draining_peers):
            return None
        return min(max((now - self._readable_since) / PUMP_SHARE, PUMP_INTERVAL_S), MAX_PUMP_INTERVAL_S)

    @property
    def stats(self) -> HoldStats:
        """A snapshot; any thread."""
        with self._lock:
            return HoldStats(
                open=len(self._holds),
                held_blocks=sum(hold.num_blocks for hold in self._holds.values()),
                released=self._released,
                revoked=self._revoked,
            )

    # Under the lock

    def _open(self, peer: str, transfer_id: int) -> None:
        if transfer_id in self._tombstones:
            self._send(peer, Gone(transfer_id, self._tombstones[transfer_id][1]))
            return
        hold = self._holds.get(transfer_id)
        if hold is None:
            deadline = self._clock() + self._limits.unknown_open_s
            self._holds[transfer_id] = Hold(transfer_id, HoldState.OPENED, deadline, peer)
            return
        if hold.peer == peer:
            return
        if hold.peer is not None:
            self._send(peer, Gone(transfer_id, "another decode worker has opened this exchange"))
            return
        hold.peer = peer
        if hold.state is HoldState.HELD:
            self._extend(hold)
        self._flush(hold)

    def _extend(self, hold: Hold) -> None:
        """Starts the deadline anew: for a peer to come, or for the one that is there to read what was computed."""
        if hold.peer is None:
            hold.deadline = self._clock() + self._limits.open_timeout_s
        elif hold.final is None:
            hold.deadline = math.inf
        else:
            hold.deadline = self._clock() + self._limits.hold_timeout_s

    def _leave(self, peer: str, message: Done | Abandon) -> None:
        transfer_id = message.transfer_id
        hold = self._holds.get(transfer_id)
        if hold is None or hold.peer != peer:
            if isinstance(message, Done):
                reason = self._tombstones.get(transfer_id, (0.0, "unknown exchange"))[1]
                self._send(peer, Gone(transfer_id, reason if hold is None else "not opened by this decode worker"))
            return
        held = hold.state is HoldState.HELD
        if isinstance(message, Done) and held:
            hold.read = True
            self._set_reading(hold, False)
            if hold.final_sent:
                self._release(hold)
            return
        reason = "left by the decode worker" if isinstance(message, Abandon) else "Done came before any segment"
        self._end(hold, HoldState.REVOKED, reason, tell=isinstance(message, Done))
        if held:
            self._ended(transfer_id)

    def _release(self, hold: Hold) -> None:
        """The peer has read all, and Final is sent: its copy is confirmed, the blocks are the engine's again."""
        assert hold.peer is not None
        self._end(hold, HoldState.RELEASED, "already released")
        self._send(hold.peer, Released(hold.transfer_id, valid=True))
        self._ended(hold.transfer_id)

    def _set_reading(self, hold: Hold, reading: bool) -> None:
        self._readers += reading - hold.reading
        hold.reading = reading

    def _prove(self, hold: Hold) -> None:
        waiting = hold.unproven
        hold.unproven = [(segment, event) for segment, event in waiting if not event.query()]
        if len(hold.unproven) < len(waiting):
            pending = {id(segment) for segment, _ in hold.unproven}
            hold.unsent += [segment for segment, _ in waiting if id(segment) not in pending]
            self._flush(hold)

    def _flush(self, hold: Hold) -> None:
        """Sends what is proven to the peer, if it has joined; Final when nothing is left to prove."""
        if hold.peer is None:
            return
        if hold.unsent and not hold.read:
            for segment in merge_segments(hold.unsent):
                for part in split_segment(segment):
                    self._send(hold.peer, part)
            self._set_reading(hold, True)
            self._readable_since = self._clock()
        hold.unsent = []
        if hold.final is not None and not hold.unproven and not hold.final_sent:
            hold.final_sent = True
            self._send(hold.peer, hold.final)
            if hold.state is HoldState.FINISHED:
                self._end(hold, HoldState.RELEASED, "finished on the prefill worker", tell=False)
            elif hold.read:
                self._release(hold)

    def _expire(self, hold: Hold) -> None:
        held = hold.state is HoldState.HELD
        if hold.state is HoldState.OPENED:
            reason = "unknown exchange"
        elif held and hold.peer is not None:
            reason = f"not read within {self._limits.hold_timeout_s:g} s (transport.hold_timeout_s)"
        elif held:
            reason = f"not opened within {self._limits.open_timeout_s:g} s (transport.open_timeout_s)"
        elif hold.state is HoldState.FINISHED:
            reason = "finished on the prefill worker"
        else:
            reason = "not admitted before its deadline"
        self._end(hold, HoldState.REVOKED, reason)
        if held:
            self._ended(hold.transfer_id)

    def _end(self, hold: Hold, state: HoldState, reason: str, tell: bool = True) -> None:
        """The one way out of the table: forgets the hold, leaves a tombstone, tells the peer of a revocation."""
        del self._holds[hold.transfer_id]
        self._set_reading(hold, False)
        if hold.state is HoldState.HELD:
            if state is HoldState.RELEASED:
                self._released += 1
            else:
                self._revoked += 1
        hold.state = state
        self._bury(hold.transfer_id, reason)
        if tell and state is HoldState.REVOKED and hold.peer in self._sessions:
            assert hold.peer is not None
            self._send(hold.peer, Gone(hold.transfer_id, reason))

    def _bury(self, transfer_id: int, reason: str) -> None:
        self._tombstones[transfer_id] = (self._clock() + self._limits.tombstone_s, reason)


def _earlier(a: float | None, b: float) -> float:
    return b if a is None else min(a, b)
