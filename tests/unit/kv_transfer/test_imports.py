# Over 400 lines: one case per transition of the import table, all on the same scripted link.
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from twinpool.kv_transfer.connectors.faulty import Fault, FaultyConnector
from twinpool.kv_transfer.connectors.local import LocalConnector
from twinpool.kv_transfer.events import Event, Finished, LinkDown, LinkUp, Loaded, Lost, Readable, Safe
from twinpool.kv_transfer.imports import ImportLimits, ImportTable, SourceRank
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import (
    Abandon,
    ConnectorMessage,
    Done,
    Final,
    First,
    FromDecode,
    Gone,
    Open,
    Released,
    Segment,
)

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=2, block_size=2, dtype="float32")
WHOLE = RankLayout.whole(LAYOUT)
NUM_BLOCKS = 8
FIRST = First(0, 42)
CPU = torch.device("cpu")


class PumpedConnector(FaultyConnector):
    @property
    def pumped(self) -> bool:
        return True


@dataclass
class World:
    """A decode rank and prefill ranks in one process; messages of the prefill side are spoken by the test."""

    shapes: list[RankLayout] = field(default_factory=lambda: [WHOLE])
    target: RankLayout = WHOLE
    limits: ImportLimits = field(default_factory=lambda: ImportLimits(read_timeout_s=20, warm_up_bytes=0))
    now: float = 1000.0
    events: list[Event] = field(default_factory=list)
    sent: list[FromDecode] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = [LocalConnector() for _ in self.shapes]
        self.full = torch.randn(NUM_BLOCKS, 4, 2, 4, 2, 2)
        for connector, shape in zip(self.sources, self.shapes, strict=True):
            view = shape.view(connector.allocate(NUM_BLOCKS * shape.block_bytes, CPU))
            view.copy_(self.full[:, shape.layer_start : shape.layer_end, :, shape.head_start : shape.head_end])
        self.connector = PumpedConnector(LocalConnector(), self.fault)
        self.view = self.target.view(self.connector.allocate(NUM_BLOCKS * self.target.block_bytes, CPU))
        self.table = ImportTable(
            [RankEndpoint(0, self.target, self.connector)], self.limits, self.events.append, lambda: self.now
        )

    def fault(self, number: int) -> Fault:
        return self.faults.pop(0) if self.faults else Fault.NONE

    def link(self) -> None:
        ranks = [
            SourceRank(rank, shape, connector.metadata(), NUM_BLOCKS)
            for rank, (shape, connector) in enumerate(zip(self.shapes, self.sources, strict=True))
        ]
        self.table.link("p", 7, ranks, self.sent.append)

    def up(self) -> None:
        self.link()
        self.polls()
        assert isinstance(self.take()[-1], LinkUp)
        self.sent.clear()

    def polls(self, times: int = 40) -> None:
        for _ in range(times):
            self.now += 0.001
            self.table.poll(self.now)

    def take(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        return events

    def expected(self, source_block: int) -> torch.Tensor:
        t = self.target
        return self.full[source_block, t.layer_start : t.layer_end, :, t.head_start : t.head_end]

    def reading(self, fault: Fault = Fault.HANG) -> None:
        """Exchange 1 has a read in flight that meets ``fault``."""
        self.up()
        self.table.open(1, "p")
        self.table.receive("p", Segment(1, 0, 0, (4, 5), 0, 4))
        self.faults = [fault]
        self.table.reserved(1, 0, [1, 2])
        self.take()
        self.sent.clear()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.table.close()
    world.connector.close()


def test_a_link_warms_up_with_the_source_awake_and_names_its_transport(world: World) -> None:
    world.link()
    assert world.sent == [Open(0)]
    world.polls()
    (event,) = world.take()
    assert isinstance(event, LinkUp)
    assert (event.peer, event.epoch, event.transport) == ("p", 7, "local/shm")
    assert world.sent == [Open(0), Done(0)]
    assert world.table.poll(world.now) is None


def test_the_whole_way(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    assert world.sent == [Open(1)]
    assert world.take() == []
    world.table.receive("p", Segment(1, 0, 0, (4, 5), 0, 4))
    world.table.receive("p", Segment(1, 0, 2, (6,), 0, 2))
    assert world.take() == [Readable(1)]
    world.table.reserved(1, 0, [3, 2, 1])
    world.polls()
    world.table.receive("p", Segment(1, 0, 2, (6,), 2, 4))
    world.now += 1
    world.table.receive("p", Final(1, 5, (FIRST,)))
    world.polls()
    assert world.sent == [Open(1), Done(1)]
    assert world.take() == []
    assert world.table.stats.open_exchanges == 1
    world.now += 1
    world.table.receive("p", Released(1, True))
    (event,) = world.take()
    assert isinstance(event, Loaded)
    assert event.first_tokens == (FIRST,)
    assert event.transfer_bytes == 3 * WHOLE.block_bytes
    assert event.exposed_transfer_s == pytest.approx(1.04)
    assert event.transfer_s == pytest.approx(2.08)
    assert event.transport == "local/shm"
    for source, target in ((4, 3), (5, 2), (6, 1)):
        assert torch.equal(world.view[target], world.expected(source))
    world.table.poll(world.now)
    assert world.table.stats.open_exchanges == 0
    assert world.table.stats.read_bytes == 3 * WHOLE.block_bytes


def test_blocks_before_the_first_wanted_are_not_read(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4, 5, 6), 0, 4))
    world.table.reserved(1, 2, [1])
    world.table.receive("p", Final(1, 6, (FIRST,)))
    world.polls()
    world.table.receive("p", Released(1, True))
    event = world.take()[-1]
    assert isinstance(event, Loaded)
    assert event.transfer_bytes == WHOLE.block_bytes
    assert torch.equal(world.view[1], world.expected(6))
    assert not world.view[2:].any()


def test_a_full_hit_reads_nothing_and_is_confirmed(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4, 5), 0, 4))
    world.table.reserved(1, 2, [])
    assert world.sent == [Open(1), Done(1)]
    world.table.receive("p", Final(1, 4, (FIRST,)))
    assert world.take() == [Readable(1)]
    world.table.receive("p", Released(1, True))
    event = world.take()[-1]
    assert isinstance(event, Loaded)
    assert (event.transfer_bytes, event.transport) == (0, "")


def test_reserved_after_final(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 4))
    world.table.receive("p", Final(1, 2, (FIRST,)))
    world.polls()
    assert world.sent == [Open(1)]
    world.table.reserved(1, 0, [1])
    world.polls()
    assert world.sent == [Open(1), Done(1)]


def test_done_does_not_wait_for_final_and_is_bounded_from_it(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 2))
    world.table.reserved(1, 0, [1])
    world.polls()
    assert world.sent == [Open(1)]
    world.table.receive("p", Segment(1, 0, 0, (4,), 2, 4))
    world.polls()
    assert world.sent == [Open(1), Done(1)]
    assert world.table.poll(world.now) is None
    world.now += 100
    world.table.receive("p", Final(1, 2, (FIRST,)))
    assert world.table.poll(world.now) == world.now + 20
    world.table.receive("p", Released(1, True))
    event = world.take()[-1]
    assert isinstance(event, Loaded)
    assert (event.exposed_transfer_s, event.confirm_s) == (0.0, 0.0)


def test_a_confirmation_without_final_is_not_used(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 4))
    world.table.reserved(1, 0, [1])
    world.polls()
    world.take()
    world.table.receive("p", Released(1, True))
    assert [type(event) for event in world.take()] == [Lost, Safe]


def test_a_final_that_promises_more_than_was_read_is_not_used(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 4))
    world.table.reserved(1, 0, [1])
    world.polls()
    world.take()
    world.table.receive("p", Final(1, 4, (FIRST,)))
    assert [type(event) for event in world.take()] == [Lost, Safe]
    assert world.sent == [Open(1), Done(1), Abandon(1)]


def test_incomplete_announcements_are_never_used(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4, 5), 0, 4))
    world.table.receive("p", Segment(1, 0, 2, (6,), 0, 3))
    world.table.reserved(1, 0, [1, 2, 3])
    world.table.receive("p", Final(1, 6, (FIRST,)))
    world.polls()
    lost, safe = world.take()[-2:]
    assert isinstance(lost, Lost)
    assert "block 2 of rank 0 was not announced completely" in lost.reason
    assert safe == Safe(1)
    assert world.sent == [Open(1), Abandon(1)]


def test_an_unconfirmed_copy_is_lost(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 4))
    world.table.reserved(1, 0, [1])
    world.table.receive("p", Final(1, 2, (FIRST,)))
    world.polls()
    world.take()
    world.table.receive("p", Released(1, False))
    assert [type(event) for event in world.take()] == [Lost, Safe]


def test_a_confirmation_that_does_not_come_is_bounded(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (4,), 0, 4))
    world.table.reserved(1, 0, [1])
    world.table.receive("p", Final(1, 2, (FIRST,)))
    world.polls()
    world.take()
    due = world.table.poll(world.now)
    assert due is not None
    assert due > world.now + 19
    world.table.poll(due)
    assert [type(event) for event in world.take()] == [Lost, Safe]
    assert world.sent[-1] == Abandon(1)


def test_gone_ends_and_says_why(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("q", Gone(1, "not yours"))
    assert world.take() == []
    world.table.receive("p", Gone(1, "cancelled"))
    assert world.take() == [Lost(1, "prefill worker p: cancelled")]
    world.table.reserved(1, 0, [1])
    assert world.take() == [Safe(1)]


def test_a_prompt_that_ended_on_prefill_is_finished(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Final(1, 2, (First(0, 42, "stop"),)))
    assert world.take() == [Finished(1)]
    assert world.sent == [Open(1)]


def test_without_a_link_an_exchange_is_lost_at_once(world: World) -> None:
    world.table.open(1, "p")
    assert world.take() == [Lost(1, "not linked to prefill worker p")]


def test_an_abandoned_read_keeps_its_blocks_until_it_has_ended(world: World) -> None:
    world.reading(Fault.HANG)
    world.table.abandon(1)
    world.polls()
    assert world.take() == []
    assert world.sent == [Open(0), Abandon(1)]
    assert world.table.stats.quarantined_blocks == 2
    world.connector.release()
    world.polls()
    assert world.take() == [Safe(1)]
    assert world.sent == [Open(0), Abandon(1), Done(0)]
    assert world.table.stats.quarantined_blocks == 0
    world.table.abandon(1)
    assert world.take() == []


def test_gone_during_a_read_keeps_the_blocks_too(world: World) -> None:
    world.reading(Fault.HANG)
    world.table.receive("p", Gone(1, "cancelled"))
    world.polls()
    assert [type(event) for event in world.take()] == [Lost]
    world.connector.release()
    world.polls()
    assert world.take() == [Safe(1)]


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_read_that_hangs_is_fenced(world: World, abandoned: bool) -> None:
    world.reading(Fault.HANG)
    if abandoned:
        world.table.abandon(1)
    world.polls()
    assert world.take() == []
    world.now += 20
    world.polls(1)
    events = world.take()
    assert [type(event) for event in events] == ([Safe, LinkDown] if abandoned else [Lost, Safe, LinkDown])
    down = events[-1]
    assert isinstance(down, LinkDown)
    assert "read_timeout_s" in down.reason
    world.view.fill_(5)
    world.connector.release()
    assert (world.view == 5).all()
    assert Abandon(1) in world.sent
    world.up()


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.REFUSE])
def test_a_failed_read_takes_the_link_and_all_its_exchanges(world: World, fault: Fault) -> None:
    world.up()
    for transfer_id in (1, 2):
        world.table.open(transfer_id, "p")
        world.table.receive("p", Segment(transfer_id, 0, 0, (4,), 0, 4))
    world.faults = [fault]
    world.table.reserved(1, 0, [1])
    world.polls()
    events = world.take()
    assert [type(event) for event in events] == [Readable, Readable, Lost, Safe, Lost, LinkDown]
    assert world.sent[-2:] == [Abandon(1), Abandon(2)]
    world.table.reserved(2, 0, [2])
    assert world.take() == [Safe(2)]


def test_a_lost_session_loses_and_frees_everything_at_once(world: World) -> None:
    world.reading(Fault.HANG)
    world.table.open(2, "p")
    world.sent.clear()
    world.table.unlink("p", "gone")
    world.table.unlink("p", "gone")
    assert world.take() == [Lost(1, "gone"), Safe(1), Lost(2, "gone"), LinkDown("p", 7, "gone")]
    assert world.sent == []
    world.view.fill_(5)
    world.connector.release()
    assert (world.view == 5).all()


def test_a_payload_that_the_connector_does_not_take_breaks_the_link(world: World) -> None:
    world.reading(Fault.HANG)
    world.table.receive("q", ConnectorMessage(0, 0, b"?"))
    world.table.receive("p", ConnectorMessage(5, 0, b"?"))
    assert world.take() == []
    world.table.receive("p", ConnectorMessage(0, 0, b"?"))
    assert [type(event) for event in world.take()] == [Lost, Safe, LinkDown]


def test_a_warm_up_that_hangs_is_bounded(world: World) -> None:
    world.faults = [Fault.HANG]
    world.link()
    world.polls()
    assert world.take() == []
    world.now += 20
    world.polls(1)
    (event,) = world.take()
    assert isinstance(event, LinkDown)
    assert "warm-up" in event.reason


def test_a_transport_that_is_too_slow_is_refused_by_name() -> None:
    world = World(limits=ImportLimits(require="rdma", warm_up_bytes=0))
    world.link()
    world.polls()
    (event,) = world.take()
    assert isinstance(event, LinkDown)
    assert "'rdma'" in event.reason
    assert "local/shm" in event.reason


TP2 = [RankLayout(LAYOUT, 0, 4, 0, 2), RankLayout(LAYOUT, 0, 4, 2, 4)]
PP2 = [RankLayout(LAYOUT, 0, 2, 0, 4), RankLayout(LAYOUT, 2, 4, 0, 4)]
PP2_TP2 = [RankLayout(LAYOUT, low, low + 2, head, head + 2) for low in (0, 2) for head in (0, 2)]
REPLICATED = [RankLayout(LAYOUT, 0, 4, 0, 2), RankLayout(LAYOUT, 0, 4, 0, 2), *TP2[1:]]


@pytest.mark.parametrize("shapes", [[WHOLE], TP2, PP2, PP2_TP2, REPLICATED], ids=["1", "tp2", "pp2", "pp2tp2", "rep"])
@pytest.mark.parametrize(
    "target", [WHOLE, TP2[1], PP2[1], RankLayout(LAYOUT, 0, 4, 3, 4)], ids=["1", "tp2", "pp2", "tp4"]
)
def test_any_shape_to_any_shape(shapes: list[RankLayout], target: RankLayout) -> None:
    world = World(shapes=shapes, target=target)
    world.up()
    world.table.open(1, "p")
    for rank, shape in enumerate(shapes):
        world.table.receive("p", Segment(1, rank, 0, (4, 6), shape.layer_start, shape.layer_end))
    world.table.reserved(1, 0, [2, 1])
    world.table.receive("p", Final(1, 4, (FIRST,)))
    world.polls()
    world.table.receive("p", Released(1, True))
    event = world.take()[-1]
    assert isinstance(event, Loaded)
    assert event.transfer_bytes == 2 * target.block_bytes
    assert torch.equal(world.view[2], world.expected(4))
    assert torch.equal(world.view[1], world.expected(6))


def test_a_source_that_lacks_heads_or_has_another_layout_is_refused() -> None:
    for shapes, text in (
        ([TP2[0]], "layer 0, KV head 2"),
        ([RankLayout.whole(KVLayout(4, 4, 2, 4, "float32"))], "block_size=4"),
    ):
        world = World(shapes=[WHOLE])
        source = SourceRank(0, shapes[0], world.sources[0].metadata(), NUM_BLOCKS)
        world.table.link("p", 7, [source], world.sent.append)
        (event,) = world.take()
        assert isinstance(event, LinkDown)
        assert text in event.reason


def test_blocks_that_the_source_does_not_have_break_the_link_not_the_process(world: World) -> None:
    world.up()
    world.table.open(1, "p")
    world.table.receive("p", Segment(1, 0, 0, (10**6,), 0, 4))
    world.table.reserved(1, 0, [1])
    assert [type(event) for event in world.take()] == [Readable, Lost, Safe, LinkDown]
