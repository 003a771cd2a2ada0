"""What only the nccl connector does: where it listens, what it refuses, and that its threads end."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, ReadState
from twinpool.kv_transfer.connectors.nccl import NcclConnector, data_host
from twinpool.kv_transfer.connectors.nccl_link import SLICE_BYTES, WINDOW, NcclLink
from twinpool.kv_transfer.connectors.pair_group import MAX_UNDER_WAY
from twinpool.kv_transfer.connectors.pair_messages import (
    MAX_RANGES,
    EndPair,
    OpenPair,
    PairKey,
    PairMessage,
    ReadSlice,
    decode,
    encode,
)
from twinpool.kv_transfer.copy_table import CopyTable

REGION_BYTES = 2 * SLICE_BYTES
BOUND_S = 20.0
READER = "reader"


@dataclass
class Ends:
    """A source and a reader in one process; the session between them is a queue that ``pump`` empties."""

    source: NcclConnector
    reader: NcclConnector
    region: torch.Tensor
    inbox: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    link: NcclLink | None = None

    def connect(self) -> NcclLink:
        self.link = self.reader.connect(self.source.metadata(), self.to_source)
        return self.link

    def to_source(self, payload: bytes) -> None:
        self.inbox.put(partial(self.source.deliver, READER, payload))

    def to_reader(self, payload: bytes) -> None:
        if self.link is not None:
            self.inbox.put(partial(self.link.deliver, payload))

    def pump(self) -> None:
        with contextlib.suppress(queue.Empty):
            self.inbox.get(timeout=0.0005)()

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not done():
            assert time.monotonic() < deadline
            self.pump()

    def read(self, link: NcclLink, table: CopyTable) -> ReadState:
        read = link.read(table)
        self.until(lambda: link.poll(read) is not ReadState.PENDING)
        return link.poll(read)


def pair_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-pair")]


@pytest.fixture
def ends() -> Iterator[Ends]:
    source, reader = NcclConnector("127.0.0.1"), NcclConnector("127.0.0.1")
    source.allocate(REGION_BYTES, torch.device("cpu")).copy_(torch.randint(0, 256, (REGION_BYTES,), dtype=torch.uint8))
    ends = Ends(source, reader, reader.allocate(REGION_BYTES, torch.device("cpu")))
    source.accept(READER, ends.to_reader)
    yield ends
    reader.close()
    source.close()
    assert pair_threads() == []


def listening() -> set[str]:
    """Local addresses, as /proc writes them, of this process's listening TCP sockets."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and f"socket:[{rest[5]}]" in links:
                found.add(local)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_listens_on_the_configured_address_alone() -> None:
    before = listening()
    with socket.create_server(("0.0.0.0", 0)):
        assert any(address.startswith("00000000:") for address in listening() - before), "the test sees listeners"
    connector = NcclConnector("127.0.0.1")
    connector.allocate(4096, torch.device("cpu"))
    connector.accept(READER, lambda payload: inbox.put(partial(link.deliver, payload)))
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    link = connector.connect(connector.metadata(), lambda p: inbox.put(partial(connector.deliver, READER, p)))
    read = link.read(CopyTable.of([(0, 2048, 1024)]))
    deadline = time.monotonic() + BOUND_S
    while link.poll(read) is ReadState.PENDING and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            inbox.get(timeout=0.001)()
    assert link.poll(read) is ReadState.DONE
    ours = listening() - before
    assert ours
    # 127.0.0.1, in the byte order of the machine.
    assert {address.split(":")[0] for address in ours} == {"0100007F" if sys.byteorder == "little" else "7F000001"}
    connector.close()


def test_a_wildcard_becomes_an_address_that_peers_can_dial() -> None:
    assert data_host("10.1.2.3") == "10.1.2.3"
    assert data_host("0.0.0.0") not in ("", "0.0.0.0", "::")


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConnectorError, match=r"cannot listen on 203\.0\.113\.7"):
        NcclConnector("203.0.113.7")


@pytest.mark.parametrize(
    "message",
    [
        OpenPair(7, bytes(range(16)), "nccl"),
        PairKey(2**64 - 1, "0/1", b"\0\xff"),
        ReadSlice(0, ((0, 1), (2**40, 2**22))),
        EndPair(1, "gone, für immer"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_the_wire(message: PairMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x09" + bytes(8),
        encode(OpenPair(1, bytes(16), "gloo"))[:-1],
        encode(ReadSlice(1, ((0, 1),)))[:-1],
        encode(ReadSlice(1, ())),
        encode(ReadSlice(1, ((0, 1),) * (MAX_RANGES + 1))),
        encode(PairKey(1, "", b"x")),
        encode(PairKey(1, "k", bytes(5000))),
        encode(PairKey(1, "key", b""))[:-2],
    ],
    ids=range(9),
)
def test_senseless_payloads_are_refused(ends: Ends, payload: bytes) -> None:
    with pytest.raises(ConnectorError):
        ends.source.deliver(READER, payload)


@pytest.mark.parametrize("ranges", [((REGION_BYTES - 1, 2),), ((0, 0),), ((0, SLICE_BYTES), (0, 1))], ids=str)
def test_a_source_sends_nothing_that_is_not_its_own(ends: Ends, ranges: tuple[tuple[int, int], ...]) -> None:
    link = ends.connect()
    assert ends.read(link, CopyTable.of([(0, 0, 16)])) is ReadState.DONE
    (_, pair) = next(iter(ends.source._sources))
    with pytest.raises(ConnectorError, match="asks for"):
        ends.source.deliver(READER, encode(ReadSlice(pair, ranges)))


def test_a_reader_that_asks_and_never_receives_is_stopped_and_its_thread_ends(ends: Ends) -> None:
    link = ends.connect()
    assert ends.read(link, CopyTable.of([(0, 0, 16)])) is ReadState.DONE
    (_, pair) = next(iter(ends.source._sources))

    def ask_too_much() -> None:
        for _ in range(WINDOW + MAX_UNDER_WAY + 1):
            ends.source.deliver(READER, encode(ReadSlice(pair, ((0, SLICE_BYTES),))))

    with pytest.raises(ConnectorError, match="slices ahead"):
        ask_too_much()
    ends.source.dismiss(READER)
    ends.until(lambda: len(pair_threads()) <= 1)
    assert ends.read(link, CopyTable.of([(0, 0, 16)])) is ReadState.FAILED


def test_a_reader_that_leaves_frees_the_source(ends: Ends) -> None:
    link = ends.connect()
    link.read(CopyTable.of([(0, 0, REGION_BYTES)]))
    link.close()
    ends.region.zero_()
    ends.until(lambda: not ends.source._sources and not pair_threads())
    assert not ends.region.any()


def test_metadata_of_an_earlier_process_fails_at_once(ends: Ends) -> None:
    link = ends.connect()
    ends.source._nonce = bytes(16)
    assert ends.read(link, CopyTable.of([(0, 0, 16)])) is ReadState.FAILED
    with pytest.raises(ConnectorError, match="earlier process"):
        link.read(CopyTable.of([(0, 0, 16)]))


def test_a_source_that_never_answers_fails_the_read() -> None:
    reader = NcclConnector("127.0.0.1", connect_timeout_s=0.2)
    reader.allocate(4096, torch.device("cpu"))
    link = reader.connect(reader.metadata(), lambda payload: None)
    read = link.read(CopyTable.of([(0, 0, 16)]))
    deadline = time.monotonic() + BOUND_S
    while link.poll(read) is ReadState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert link.poll(read) is ReadState.FAILED
    with pytest.raises(ConnectorError, match=r"did not connect within 0.2 s"):
        link.read(CopyTable.of([(0, 0, 16)]))
    reader.close()
