# Over 400 lines: one state machine; its rules, model and invariants only make sense side by side.
"""Both sides of the exchange, joined by queues, under every order of events that hypothesis can think of.

The prefill side writes a known content into its blocks, and garbage as soon as they are free. The decode side marks its
blocks as soon as it owns them again. So whatever is confirmed must have the known content, and no mark may change: a
copy of a block that was reused, or a read that lands in a block that was reused, shows up in the bytes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twinpool.kv_transfer.connectors.faulty import Fault, FaultyConnector
from twinpool.kv_transfer.connectors.local import LocalConnector
from twinpool.kv_transfer.events import Event, Finished, LinkDown, LinkUp, Loaded, Lost, Readable, Safe
from twinpool.kv_transfer.holds import HoldLimits, HoldTable
from twinpool.kv_transfer.imports import ImportLimits, ImportTable, SourceRank
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import First, FromDecode, FromPrefill

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=2, block_size=2, dtype="float32")
WHOLE = RankLayout.whole(LAYOUT)
NUM_BLOCKS = 9
GARBAGE, MARK = -7.0, -3.0

seldom = st.integers(0, 30).map(lambda number: number in (11, 17, 23))
"""Drawn by the rules that destroy much, so that most exchanges get somewhere."""


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class KernelEvent:
    """``write`` is what the kernel does when it runs, which may be after the announcement."""

    write: Callable[[], None]
    ready: bool = False

    def run(self) -> None:
        if not self.ready:
            self.write()
            self.ready = True

    def query(self) -> bool:
        return self.ready


class PumpedConnector(FaultyConnector):
    """Says that it needs the source, so that the source is told when it may rest."""

    @property
    def pumped(self) -> bool:
        return True


@dataclass
class PrefillRequest:
    num_blocks: int
    blocks: list[int] | None = None
    steps: int = 0
    events: list[KernelEvent] = field(default_factory=list)
    final: bool = False
    over: bool = False


@dataclass
class DecodeRequest:
    num_blocks: int
    readable: bool = False
    first_block: int = 0
    blocks: list[int] | None = None
    over: bool = False
    loaded: bool = False
    safe: bool = False


class Prefill:
    """A prefill worker: blocks, requests and the hold table. Layer groups of two layers, all blocks at once."""

    def __init__(self, clock: Clock, send: deque[FromPrefill]) -> None:
        self.connector = LocalConnector(slice_bytes=WHOLE.layer_bytes)
        region = self.connector.allocate(NUM_BLOCKS * WHOLE.block_bytes, torch.device("cpu"))
        self.view = WHOLE.view(region)
        self.view.fill_(GARBAGE)
        self.free = list(range(1, NUM_BLOCKS))
        self.requests: dict[int, PrefillRequest] = {}
        limits = HoldLimits(open_timeout_s=10, hold_timeout_s=60, unknown_open_s=2, tombstone_s=1000)
        self.holds = HoldTable(limits, lambda peer, message: send.append(message), self.ended, lambda: None, clock)

    def ended(self, transfer_id: int) -> None:
        request = self.requests[transfer_id]
        assert not request.over, "ended called twice, or for a request that the engine had ended"
        self.end(request)

    def end(self, request: PrefillRequest) -> None:
        request.over = True
        for block in request.blocks or []:
            self.view[block] = GARBAGE
            self.free.append(block)
        request.blocks = None

    def compute(self, transfer_id: int, ready: bool) -> None:
        request = self.requests[transfer_id]
        assert request.blocks is not None
        low, high = 2 * request.steps, 2 * request.steps + 2
        request.steps += 1

        def write() -> None:
            for index, block in enumerate(request.blocks or []):
                self.view[block, low:high] = content(transfer_id, index, low, high)

        event = KernelEvent(write)
        if ready:
            event.run()
        request.events.append(event)
        self.holds.announce(transfer_id, 0, request.blocks, low, high, event)


def pick(ids: list[int], which: int) -> int:
    return ids[which % len(ids)]


def content(transfer_id: int, index: int, low: int, high: int) -> torch.Tensor:
    shape = (high - low, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)
    layers = torch.arange(low, high, dtype=torch.float32).view(-1, 1, 1, 1, 1)
    return (transfer_id * 1000 + index * 10 + layers).expand(shape)


class ExchangeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.up: deque[FromDecode] = deque()
        self.down: deque[FromPrefill] = deque()
        self.session = 0
        self.connected = False
        self.next_id = 1
        self.prefill = Prefill(self.clock, self.down)
        self.old: list[LocalConnector] = []
        self.connector = PumpedConnector(LocalConnector(slice_bytes=WHOLE.layer_bytes), self.fault)
        region = self.connector.allocate(NUM_BLOCKS * WHOLE.block_bytes, torch.device("cpu"))
        self.view = WHOLE.view(region)
        self.view.fill_(MARK)
        self.free = list(range(1, NUM_BLOCKS))
        self.requests: dict[int, DecodeRequest] = {}
        self.faults: deque[Fault] = deque()
        self.linked = False
        self.imports = ImportTable(
            [RankEndpoint(0, WHOLE, self.connector)],
            ImportLimits(read_timeout_s=20, warm_up_bytes=0),
            self.take,
            self.clock,
        )
        self.connect()
        self.nothing_disturbs()
        assert self.linked

    def fault(self, number: int) -> Fault:
        return self.faults.popleft() if self.faults else Fault.NONE

    def teardown(self) -> None:
        """Whatever happened: let everything come to its end, and everything is free again."""
        self.connector.release()
        self.faults.clear()
        for transfer_id, request in self.prefill.requests.items():
            for event in request.events:
                event.run()
            if not request.over and not request.final:
                self.prefill.holds.revoke(transfer_id, "over")
                self.prefill.end(request)
        for transfer_id, decode in self.requests.items():
            if not decode.over:
                decode.over = True
                self.imports.abandon(transfer_id)
        for _ in range(200):
            self.everything_delivered()
            self.polled()
        self.clock.now += 1000
        for _ in range(3):
            self.polled()
            self.everything_delivered()
        assert self.prefill.holds.stats.open == 0
        assert self.prefill.holds.stats.held_blocks == 0
        assert self.prefill.holds.pump_interval(self.clock.now) is None
        assert self.imports.stats.open_exchanges == 0
        assert self.imports.stats.quarantined_blocks == 0
        for decode in self.requests.values():
            if decode.loaded:
                self.give_back(decode)
        assert sorted(self.prefill.free) == list(range(1, NUM_BLOCKS))
        assert sorted(self.free) == list(range(1, NUM_BLOCKS))
        self.imports.close()
        self.connector.close()
        self.prefill.connector.close()

    # The decode engine

    def take(self, event: Event) -> None:
        if isinstance(event, LinkUp):
            self.linked = True
        elif isinstance(event, LinkDown):
            self.linked = False
        elif isinstance(event, Safe):
            request = self.requests[event.transfer_id]
            assert request.over, "Safe before the end"
            assert not request.safe, "Safe twice"
            assert not request.loaded
            assert request.blocks is not None, "Safe for what was never reserved"
            request.safe = True
            self.give_back(request)
        else:
            request = self.requests[event.transfer_id]
            assert not request.over, f"{event} after the end"
            if isinstance(event, Readable):
                assert not request.readable
                request.readable = True
                return
            request.over = True
            if isinstance(event, Loaded):
                assert request.blocks is not None
                request.loaded = True
                for index, block in enumerate(request.blocks, request.first_block):
                    expected = content(event.transfer_id, index, 0, LAYOUT.num_layers)
                    assert torch.equal(self.view[block], expected), "confirmed, but not what prefill wrote"
            else:
                assert isinstance(event, (Lost, Finished))

    def give_back(self, request: DecodeRequest) -> None:
        for block in request.blocks or []:
            self.view[block] = MARK
            self.free.append(block)
        request.blocks = []

    # Sessions

    def connect(self) -> None:
        self.down.clear()
        self.session += 1
        self.connected = True
        self.prefill.holds.session_began(str(self.session))
        self.link()

    def link(self) -> None:
        source = SourceRank(0, WHOLE, self.prefill.connector.metadata(), NUM_BLOCKS)
        session = self.session
        self.imports.link(
            "p", session, [source], lambda message: self.up.append(message) if session == self.session else None
        )

    def disconnect(self) -> None:
        self.up.clear()
        self.down.clear()
        self.connected = False
        self.prefill.holds.session_ended(str(self.session))
        self.imports.unlink("p")

    def everything_delivered(self) -> None:
        while self.up or self.down:
            self.deliver(up=bool(self.up))

    def deliver(self, up: bool) -> None:
        if up:
            message = self.up.popleft()
            self.prefill.holds.receive(str(self.session), message)  # type: ignore[arg-type]
        else:
            self.imports.receive("p", self.down.popleft())

    def polled(self) -> None:
        self.clock.now += 0.0005
        self.prefill.holds.poll(self.clock.now)
        self.imports.poll(self.clock.now)

    # Rules

    @precondition(lambda self: self.linked and len(self.requests) < 12)
    @rule(num_blocks=st.integers(1, 4), expected=st.booleans(), at_decode=st.sampled_from([True, True, True, False]))
    def submit(self, num_blocks: int, expected: bool, at_decode: bool) -> None:
        transfer_id = self.next_id
        self.next_id += 1
        self.prefill.requests[transfer_id] = PrefillRequest(num_blocks)
        if expected:
            self.prefill.holds.expect(transfer_id)
        if at_decode:
            self.requests[transfer_id] = DecodeRequest(num_blocks)
            self.imports.open(transfer_id, "p")

    def computing(self) -> list[int]:
        return [i for i, r in self.prefill.requests.items() if not r.over and not r.final]

    @precondition(lambda self: self.computing())
    @rule(which=st.integers(0, 11), ready=st.booleans(), finish=st.integers(0, 5))
    def prefill_goes_on(self, which: int, ready: bool, finish: int) -> None:
        self.step(pick(self.computing(), which), ready, finish == 5)

    def step(self, transfer_id: int, ready: bool, finished: bool) -> None:
        request = self.prefill.requests[transfer_id]
        if request.blocks is None:
            if len(self.prefill.free) >= request.num_blocks:
                request.blocks = [self.prefill.free.pop(0) for _ in range(request.num_blocks)]
                self.prefill.holds.begin(transfer_id, request.num_blocks)
        elif request.steps < 2:
            self.prefill.compute(transfer_id, ready)
        else:
            # An odd number of tokens: the last block is half full.
            tokens = request.num_blocks * LAYOUT.block_size - 1
            first = First(0, 42, "stop" if finished else "")
            request.final = True
            self.prefill.holds.final(transfer_id, tokens, [first])
            if first.finish and not request.over:
                self.prefill.end(request)

    @precondition(lambda self: [i for i, r in self.prefill.requests.items() if not r.over])
    @rule(which=st.integers(0, 11), really=seldom)
    def prefill_cancels(self, which: int, really: bool) -> None:
        if not really:
            return
        transfer_id = pick([i for i, r in self.prefill.requests.items() if not r.over], which)
        request = self.prefill.requests[transfer_id]
        if request.blocks is None:
            self.prefill.holds.refuse(transfer_id, "no room")
        else:
            self.prefill.holds.revoke(transfer_id, "cancelled")
        self.prefill.end(request)

    @rule()
    def kernels_finish(self) -> None:
        for request in self.prefill.requests.values():
            for event in request.events:
                event.run()

    def reservable(self) -> list[int]:
        return [i for i, r in self.requests.items() if r.readable and not r.over and r.blocks is None]

    @precondition(lambda self: self.reservable())
    @rule(which=st.integers(0, 11), hits=st.integers(0, 4))
    def decode_reserves(self, which: int, hits: int) -> None:
        self.reserve(pick(self.reservable(), which), hits)

    def reserve(self, transfer_id: int, hits: int) -> None:
        request = self.requests[transfer_id]
        first_block = min(hits, request.num_blocks)
        wanted = request.num_blocks - first_block
        if len(self.free) < wanted:
            return
        request.first_block = first_block
        request.blocks = [self.free.pop() for _ in range(wanted)]
        self.imports.reserved(transfer_id, first_block, request.blocks)

    @precondition(lambda self: [i for i, r in self.requests.items() if not r.over])
    @rule(which=st.integers(0, 11), really=seldom)
    def decode_abandons(self, which: int, really: bool) -> None:
        if not really:
            return
        transfer_id = pick([i for i, r in self.requests.items() if not r.over], which)
        self.requests[transfer_id].over = True
        self.imports.abandon(transfer_id)

    @precondition(lambda self: [r for r in self.requests.values() if r.loaded and r.blocks])
    @rule()
    def decode_finishes(self) -> None:
        self.give_back(next(r for r in self.requests.values() if r.loaded and r.blocks))

    @precondition(lambda self: self.up)
    @rule()
    def deliver_up(self) -> None:
        self.deliver(up=True)

    @precondition(lambda self: self.down)
    @rule()
    def deliver_down(self) -> None:
        self.deliver(up=False)

    @rule(times=st.integers(1, 6), ready=st.booleans(), polls=st.integers(0, 12))
    def it_goes_on(self, times: int, ready: bool, polls: int) -> None:
        """Everybody does what it can; so that long ways through the states are walked too."""
        for _ in range(times):
            for transfer_id in self.computing():
                self.step(transfer_id, ready=ready, finished=False)
            self.everything_delivered()
            for transfer_id in self.reservable():
                self.reserve(transfer_id, 0)
            for _ in range(polls):
                self.polled()

    @rule()
    def nothing_disturbs(self) -> None:
        for _ in range(30):
            self.everything_delivered()
            self.polled()

    @rule(times=st.integers(1, 30))
    def poll(self, times: int) -> None:
        for _ in range(times):
            self.polled()

    @rule(seconds=st.sampled_from([0.1, 3.0, 12.0, 25.0, 70.0]), really=seldom)
    def time_passes(self, seconds: float, really: bool) -> None:
        if not really:
            return
        self.clock.now += seconds
        self.polled()

    @rule(fault=st.sampled_from(list(Fault)), really=seldom)
    def next_read_is(self, fault: Fault, really: bool) -> None:
        if not really:
            return
        self.faults.append(fault)

    @rule()
    def what_hung_lands(self) -> None:
        self.connector.release()

    @precondition(lambda self: self.connected)
    @rule(really=seldom)
    def session_is_lost(self, really: bool) -> None:
        if not really:
            return
        self.disconnect()

    @precondition(lambda self: not self.connected)
    @rule(at_once=st.booleans())
    def session_is_back(self, at_once: bool) -> None:
        self.connect()
        if not at_once:
            self.nothing_disturbs()

    @precondition(lambda self: self.connected and not self.linked)
    @rule()
    def linked_again(self) -> None:
        self.link()

    @rule(really=seldom)
    def prefill_dies_and_comes_back(self, really: bool) -> None:
        if not really:
            return
        if self.connected:
            self.disconnect()
        self.prefill.connector.close()
        self.prefill = Prefill(self.clock, self.down)

    @invariant()
    def marks_are_untouched(self) -> None:
        for block in self.free:
            assert bool((self.view[block] == MARK).all()), "a read landed in a block that was free"

    @invariant()
    def blocks_have_one_owner(self) -> None:
        owned = [block for request in self.prefill.requests.values() for block in request.blocks or []]
        assert sorted([*owned, *self.prefill.free]) == list(range(1, NUM_BLOCKS))
        assert math.isfinite(self.clock.now)


TestExchange = ExchangeMachine.TestCase
TestExchange.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


WEIGHTS = {
    "submit": 4,
    "prefill_goes_on": 6,
    "it_goes_on": 2,
    "prefill_cancels": 0.5,
    "kernels_finish": 2,
    "decode_reserves": 4,
    "decode_abandons": 0.5,
    "decode_finishes": 1,
    "deliver_up": 4,
    "deliver_down": 6,
    "poll": 6,
    "time_passes": 0.3,
    "next_read_is": 1,
    "what_hung_lands": 0.5,
    "session_is_lost": 0.2,
    "session_is_back": 2,
    "linked_again": 2,
    "prefill_dies_and_comes_back": 0.1,
}


def step(machine: ExchangeMachine, name: str, draw: random.Random) -> None:
    """Calls a rule if it may be called, with arguments like those that hypothesis draws."""
    which, coin = draw.randrange(12), draw.random() < 0.5
    requests = [request for request in machine.requests.values() if not request.over]
    if name == "submit" and machine.linked and len(requests) < 4:
        machine.submit(draw.randint(1, 4), coin, draw.random() < 0.9)
    elif name == "prefill_goes_on" and machine.computing():
        machine.prefill_goes_on(which, coin, draw.randint(0, 20))
    elif name == "it_goes_on":
        machine.it_goes_on(draw.randint(1, 3), coin, draw.randint(0, 4))
    elif name == "prefill_cancels" and [r for r in machine.prefill.requests.values() if not r.over]:
        machine.prefill_cancels(which, True)
    elif name == "decode_reserves" and machine.reservable():
        machine.decode_reserves(which, draw.choice([0, 0, 1, 4]))
    elif name == "decode_abandons" and requests:
        machine.decode_abandons(which, True)
    elif name == "decode_finishes" and [r for r in machine.requests.values() if r.loaded and r.blocks]:
        machine.decode_finishes()
    elif name == "deliver_up" and machine.up:
        machine.deliver_up()
    elif name == "deliver_down" and machine.down:
        machine.deliver_down()
    elif name == "poll":
        machine.poll(draw.randint(1, 8))
    elif name == "time_passes":
        machine.time_passes(draw.choice([0.1, 3.0, 12.0, 25.0, 70.0]), True)
    elif name == "next_read_is" and not machine.faults:
        machine.next_read_is(draw.choice(list(Fault)), True)
    elif name == "kernels_finish":
        machine.kernels_finish()
    elif name == "what_hung_lands":
        machine.what_hung_lands()
    elif name == "session_is_lost" and machine.connected:
        machine.session_is_lost(True)
    elif name == "session_is_back" and not machine.connected:
        machine.session_is_back(coin)
    elif name == "linked_again" and machine.connected and not machine.linked:
        machine.linked_again()
    elif name == "prefill_dies_and_comes_back":
        machine.prefill_dies_and_comes_back(True)


def walk(seed: int, steps: int) -> ExchangeMachine:
    draw = random.Random(seed)
    machine = ExchangeMachine()
    for name in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps):
        step(machine, name, draw)
        machine.marks_are_untouched()
        machine.blocks_have_one_owner()
    machine.teardown()
    return machine


@pytest.mark.parametrize("group", range(10))
def test_long_random_walks(group: int) -> None:
    """Deeper than hypothesis gets: hundreds of steps, weighted so that most exchanges get somewhere."""
    machines = [walk(seed, 400) for seed in range(group * 10, group * 10 + 10)]
    loaded = sum(request.loaded for machine in machines for request in machine.requests.values())
    assert loaded >= 10
