"""What every connector promises, with the source in a process of its own."""

import contextlib
import functools
import itertools
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from twinpool.kv_transfer.block_table import BlockTable
from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, Link, Read, ReadState
from twinpool.kv_transfer.connectors.choose import make_connector, nixl_installed
from twinpool.kv_transfer.connectors.faulty import FaultyConnector
from twinpool.kv_transfer.connectors.nccl import NcclConnector
from twinpool.kv_transfer.connectors.ucx import UcxSettings
from twinpool.kv_transfer.copy_table import CopyRange, CopyTable

SOURCE = Path(__file__).with_name("kv_source.py")
MIB = 1 << 20
BOUND_S = 20.0


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    words = torch.arange((num_bytes + 7) // 8, dtype=torch.int64)
    return ((words + 1) * 0x9E3779B97F4A7C1 + seed * 0x632BE59BD9B4E01).view(torch.uint8)[:num_bytes]


@dataclass
class Source:
    process: subprocess.Popen[bytes]
    content: torch.Tensor
    sending: threading.Lock = field(default_factory=threading.Lock)
    inboxes: dict[str, queue.SimpleQueue[bytes]] = field(default_factory=dict)

    @functools.cached_property
    def metadata(self) -> bytes:
        """Waits until the source serves; so several can start at once."""
        assert self.process.stdout is not None
        metadata = bytes.fromhex(self.process.stdout.readline().decode())
        threading.Thread(target=self._take_lines, daemon=True).start()
        return metadata

    def session(self, peer: str) -> queue.SimpleQueue[bytes]:
        """Begins a session; returns where its payloads arrive. What is sent after the source's death is lost."""
        self.inboxes[peer] = queue.SimpleQueue()
        return self.inboxes[peer]

    def send(self, peer: str, payload: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.sending:
            os.write(self.process.stdin.fileno(), f"{peer} {payload.hex()}\n".encode())

    def _take_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            peer, payload = line.decode().split()
            self.inboxes[peer].put(bytes.fromhex(payload))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class SessionLink:
    """``inner`` with its session: what the source said is delivered between polls, on the thread that polls."""

    inner: Link
    inbox: queue.SimpleQueue[bytes]

    @property
    def transport(self) -> str:
        return self.inner.transport

    def read(self, ranges: list[CopyRange] | CopyTable) -> Read:
        return self.inner.read(ranges if isinstance(ranges, CopyTable) else CopyTable.of(ranges))

    def poll(self, read: Read) -> ReadState:
        with contextlib.suppress(queue.Empty):
            while True:
                self.inner.deliver(self.inbox.get_nowait())
        return self.inner.poll(read)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Bench:
    """A reader in this process and the means to start sources."""

    kind: str
    tls: str | None
    reader: Connector
    region: torch.Tensor
    sources: list[Source] = field(default_factory=list)
    lasting: Source | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def source(self) -> Source:
        """One that lives as long as the bench, for tests that do it no harm."""
        if self.lasting is None:
            self.lasting = self.start(64 * MIB)
        return self.lasting

    def start(self, num_bytes: int = 8 * MIB, seed: int = 1) -> Source:
        arguments = [sys.executable, str(SOURCE), self.kind, self.tls or "-", str(num_bytes), str(seed)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        source = Source(process, pattern(num_bytes, seed))
        self.sources.append(source)
        return source

    def connect(self, source: Source) -> SessionLink:
        metadata, peer = source.metadata, f"reader-{next(self.numbers)}"
        inbox = source.session(peer)
        return SessionLink(self.reader.connect(metadata, functools.partial(source.send, peer)), inbox)

    def finish(self, link: SessionLink, read: Read) -> ReadState:
        return poll_until(lambda: link.poll(read), lambda state: state is not ReadState.PENDING)

    def read(self, link: SessionLink, ranges: list[CopyRange] | CopyTable) -> ReadState:
        try:
            return self.finish(link, link.read(ranges))
        except ConnectorError:
            return ReadState.FAILED


def poll_until(poll: Callable[[], ReadState], done: Callable[[ReadState], bool]) -> ReadState:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        state = poll()
        if done(state):
            return state
        time.sleep(0.0005)
    raise AssertionError("not within bounds")


FOREIGN_PATH = b'{"path": "/etc/hostname", "pid": 1, "nonce": "00", "bytes": 1}'
CONNECTORS = [("local", None), ("nixl", None), ("nixl", "tcp"), ("nccl", None), ("faulty", None)]


@pytest.fixture(params=CONNECTORS, ids=["local", "nixl", "nixl-tcp", "gloo", "faulty"], scope="module")
def module_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    kind, tls = request.param
    if kind == "nixl" and not nixl_installed():
        pytest.skip("nixl is not installed")
    monkeypatch = pytest.MonkeyPatch()
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    inner_kind = "local" if kind == "faulty" else kind
    reader: Connector = make_connector(inner_kind, UcxSettings(tls, "lo"), "127.0.0.1")
    if kind == "nccl":
        reader = NcclConnector("127.0.0.1", connect_timeout_s=5.0)
    if kind == "faulty":
        reader = FaultyConnector(reader)
    bench = Bench(inner_kind, tls, reader, reader.allocate(64 * MIB, torch.device("cpu")))
    yield bench
    reader.close()
    for source in bench.sources:
        with contextlib.suppress(ProcessLookupError):
            source.signal(signal.SIGCONT)
        source.kill()
        assert source.process.stdin is not None
        assert source.process.stdout is not None
        source.process.stdin.close()
        source.process.stdout.close()
    monkeypatch.undo()


@pytest.fixture
def bench(module_bench: Bench) -> Bench:
    module_bench.region.zero_()
    return module_bench


SHAPES = {
    "one byte": [CopyRange(3, 5, 1)],
    "one block": [CopyRange(0, 65536, 65536)],
    "everything": [CopyRange(0, 0, 8 * MIB)],
    "few large": [CopyRange(i * 2 * MIB, (3 - i) * 2 * MIB, MIB) for i in range(4)],
    "many small": [CopyRange(i * 4096, (1023 - i) * 8192, 1000) for i in range(1024)],
    "same source twice": [CopyRange(4096, 0, 4096), CopyRange(4096, 8192, 4096)],
    "unaligned": [CopyRange(1 + i * 777, 3 + i * 1001, 333 + i) for i in range(50)],
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_bytes_arrive_where_they_belong_and_nowhere_else(bench: Bench, shape: str) -> None:
    source = bench.source()
    link = bench.connect(source)
    expected = bench.region.clone()
    for item in SHAPES[shape]:
        expected[item.target : item.target + item.length] = source.content[item.source : item.source + item.length]
    read = link.read(SHAPES[shape])
    assert read.num_bytes == sum(item.length for item in SHAPES[shape])
    assert bench.finish(link, read) is ReadState.DONE
    assert torch.equal(bench.region, expected)


@pytest.mark.parametrize("count", [1, 20, 512])
def test_whole_blocks_arrive_where_they_belong(bench: Bench, count: int) -> None:
    """512 blocks take more than one request."""
    source = bench.source()
    link = bench.connect(source)
    block_bytes = 65536
    number = bench.region.numel() // block_bytes
    table = BlockTable(
        [(5 * i) % number for i in range(count)], [(7 * i + 3) % number for i in range(count)], block_bytes
    )
    expected = bench.region.view(number, block_bytes).clone()
    expected[table.target] = source.content.view(number, block_bytes)[table.source]
    read = link.read(table)
    assert read.num_bytes == count * block_bytes
    assert bench.finish(link, read) is ReadState.DONE
    assert torch.equal(bench.region, expected.view(-1))


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1), (1024, 0), (0, 1024)])
def test_blocks_outside_the_regions_are_refused(bench: Bench, bad: tuple[int, int]) -> None:
    link = bench.connect(bench.source())
    with pytest.raises(ConnectorError, match="outside the regions"):
        link.read(BlockTable([1, bad[0]], [1, bad[1]], 65536))
    assert bench.read(link, BlockTable([1023], [1023], 65536)) is ReadState.DONE


def test_a_read_larger_than_a_slice(bench: Bench) -> None:
    source = bench.source()
    link = bench.connect(source)
    assert bench.read(link, [CopyRange(0, 0, 64 * MIB)]) is ReadState.DONE
    assert torch.equal(bench.region, source.content)


def test_the_transport_is_named(bench: Bench) -> None:
    link = bench.connect(bench.source())
    assert bench.read(link, [CopyRange(0, 0, 65536)]) is ReadState.DONE
    expected = {
        ("local", None): "local/shm",
        ("nixl", None): "nixl/shm",
        ("nixl", "tcp"): "nixl/tcp",
        ("nccl", None): "nccl/gloo",
    }
    assert link.transport == expected[(bench.kind, bench.tls)]


def test_links_are_independent(bench: Bench) -> None:
    sources = [bench.start(seed=seed) for seed in range(3)]
    # All up, so that no link waits for the start of another's source.
    assert all(source.metadata for source in sources)
    links = [bench.connect(source) for source in sources]
    reads = [link.read([CopyRange(0, i * 8 * MIB, 8 * MIB)]) for i, link in enumerate(links)]
    states = [bench.finish(link, read) for link, read in zip(links, reads, strict=True)]
    assert states == [ReadState.DONE] * 3
    for i, source in enumerate(sources):
        assert torch.equal(bench.region[i * 8 * MIB : (i + 1) * 8 * MIB], source.content)
    links[0].close()
    sources[1].kill()
    assert bench.read(links[1], [CopyRange(0, 0, 4096)]) is ReadState.FAILED
    assert bench.read(links[2], [CopyRange(0, 0, 8 * MIB)]) is ReadState.DONE
    assert torch.equal(bench.region[: 8 * MIB], sources[2].content)


def test_a_killed_source_fails_the_read_in_flight_and_the_next(bench: Bench) -> None:
    source = bench.start(64 * MIB)
    link = bench.connect(source)
    assert bench.read(link, [CopyRange(0, 0, 4096)]) is ReadState.DONE
    read = link.read([CopyRange(0, 0, 64 * MIB)])
    source.kill()
    # A one-sided transport may have finished already; it must not stay pending.
    assert bench.finish(link, read) in (ReadState.FAILED, ReadState.DONE)
    assert bench.read(link, [CopyRange(0, 0, 64 * MIB)]) is ReadState.FAILED
    link.close()


def test_a_dead_source_cannot_be_connected_to(bench: Bench) -> None:
    source = bench.start()
    assert source.metadata
    source.kill()
    try:
        link = bench.connect(source)
    except ConnectorError:
        return
    assert bench.read(link, [CopyRange(0, 0, 4096)]) is ReadState.FAILED


def test_a_restarted_source_is_another_source(bench: Bench) -> None:
    first = bench.start(seed=1)
    link = bench.connect(first)
    assert bench.read(link, [CopyRange(0, 0, 4096)]) is ReadState.DONE
    first.kill()
    second = bench.start(seed=2)
    assert bench.read(link, [CopyRange(0, 0, 8 * MIB)]) is ReadState.FAILED
    link.close()
    link = bench.connect(second)
    assert bench.read(link, [CopyRange(0, 0, 8 * MIB)]) is ReadState.DONE
    assert torch.equal(bench.region[: 8 * MIB], second.content)


def test_nothing_lands_after_close_when_a_stopped_source_goes_on(bench: Bench) -> None:
    source = bench.start(64 * MIB)
    link = bench.connect(source)
    assert bench.read(link, [CopyRange(0, 0, 4096)]) is ReadState.DONE
    source.signal(signal.SIGSTOP)
    read = link.read([CopyRange(0, 0, 64 * MIB)])
    for _ in range(20):
        link.poll(read)
        time.sleep(0.001)
    link.close()
    bench.region.zero_()
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert not bench.region.any()
    assert link.poll(read) is not ReadState.PENDING


def test_close_is_idempotent_and_a_closed_link_refuses(bench: Bench) -> None:
    link = bench.connect(bench.source())
    link.close()
    link.close()
    with pytest.raises(ConnectorError):
        link.read([CopyRange(0, 0, 4096)])


@pytest.mark.parametrize(
    "bad",
    [CopyRange(64 * MIB - 1, 0, 2), CopyRange(0, 64 * MIB - 1, 2), CopyRange(-1, 0, 2), CopyRange(0, 0, 0)],
    ids=str,
)
def test_ranges_outside_the_regions_are_refused(bench: Bench, bad: CopyRange) -> None:
    link = bench.connect(bench.source())
    with pytest.raises(ConnectorError, match="outside"):
        link.read([bad])


def test_foreign_metadata_is_refused(bench: Bench) -> None:
    for metadata in (b"", b"{}", FOREIGN_PATH, b"twinnixl", b"twinnccl", os.urandom(300)):
        with pytest.raises(ConnectorError):
            bench.reader.connect(metadata, lambda payload: None)


def test_links_can_be_made_again_and_again(bench: Bench) -> None:
    source = bench.source()
    for i in range(10):
        link = bench.connect(source)
        assert bench.read(link, [CopyRange(i * 4096, 0, 4096)]) is ReadState.DONE
        assert torch.equal(bench.region[:4096], source.content[i * 4096 : (i + 1) * 4096])
        link.close()


def test_an_idle_link_costs_nothing(bench: Bench) -> None:
    link = bench.connect(bench.source())
    assert bench.read(link, [CopyRange(0, 0, 4096)]) is ReadState.DONE
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # A progress thread would use all of the half second.
    assert used < 0.1
