"""One suite for executors of one rank and of several processes: what they promise to the engine and the exchange."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from processes import children
from steps import run_step

from pair import Pool
from tiny_models import write_tiny_llama
from twinpool.engine.errors import RanksLost
from twinpool.engine.plan import ScheduledRequest, StepPlan
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.kv_transfer.connectors.base import ConnectorError, ReadState
from twinpool.kv_transfer.connectors.local import LocalConnector
from twinpool.kv_transfer.copy_table import CopyTable

BLOCK = 8
SHAPES = {"inline": (1, 1), "TP2": (2, 1), "PP2": (1, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module", params=SHAPES)
def pool(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pool]:
    made = Pool.load(folder, BLOCK, 40, *SHAPES[request.param])
    yield made
    made.close()


def prompt(length: int, **sampling: int) -> Request:
    ids = [(5 * i + length) % 250 + 1 for i in range(length)]
    return Request(length, ids, SamplingParams(temperature=0, **sampling), StopParams(4), block_ids=[5, 9, 2, 7])


def plan(*requests: Request, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    scheduled = [ScheduledRequest(r, r.num_tokens - r.num_computed_tokens, True) for r in requests]
    return StepPlan(1, scheduled, copies)


@pytest.fixture
def region(pool: Pool) -> Iterator[Callable[[int], bytes]]:
    """A function rank -> the rank's whole region at this moment, read from this process."""
    reader = LocalConnector()
    largest = max(rank.layout.block_bytes for rank in pool.ranks) * pool.built.num_blocks
    target = reader.allocate(largest, torch.device("cpu"))
    links = [reader.connect(rank.endpoint.metadata(), lambda payload: None) for rank in pool.ranks]

    def read(rank: int) -> bytes:
        length = pool.ranks[rank].layout.block_bytes * pool.built.num_blocks
        started = links[rank].read(CopyTable.of([(0, 0, length)]))
        while links[rank].poll(started) is ReadState.PENDING:
            pass
        return bytes(target[:length].numpy())

    yield read
    reader.close()


def test_each_rank_announces_each_layer_once_and_only_when_it_is_written(
    pool: Pool, region: Callable[[int], bytes]
) -> None:
    seen: list[tuple[int, int, int, bytes]] = []

    def on_layers(rank: int, start: int, end: int, event: object) -> None:
        assert event.query()  # type: ignore[attr-defined]
        seen.append((rank, start, end, region(rank)))

    request = prompt(30)
    run_step(pool.built.executor, plan(request), 4, on_layers)
    for item in pool.ranks:
        mine = [(start, end, data) for rank, start, end, data in seen if rank == item.rank]
        layers = [layer for start, end, _ in mine for layer in range(start, end)]
        assert layers == list(range(item.layout.layer_start, item.layout.layer_end))
        final = item.layout.view(torch.frombuffer(bytearray(region(item.rank)), dtype=torch.uint8))
        for start, end, data in mine:
            then = item.layout.view(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            part = slice(start - item.layout.layer_start, end - item.layout.layer_start)
            assert torch.equal(then[request.block_ids, part], final[request.block_ids, part])
            assert final[request.block_ids, part].any()


def test_a_plan_that_makes_no_sense_harms_nobody(pool: Pool, region: Callable[[int], bytes]) -> None:
    executor = pool.built.executor
    good = run_step(executor, plan(prompt(20)), 1, None).sampled[0].token_ids
    bad = prompt(21)
    bad.prompt_ids = [*bad.prompt_ids[:-1], 10_000]
    with pytest.raises(ValueError, match="10000 is outside the vocabulary"):
        run_step(executor, plan(bad, copies=((5, 30),)), 1, None)
    for item in pool.ranks:
        blocks = item.layout.view(torch.frombuffer(bytearray(region(item.rank)), dtype=torch.uint8))
        assert torch.equal(blocks[5], blocks[30])
        assert blocks[5].any()
    assert run_step(executor, StepPlan(2, [], [(5, 31)]), 1, None).sampled == []
    assert run_step(executor, plan(prompt(20)), 1, None).sampled[0].token_ids == good


def test_a_sampler_that_fails_leaves_the_ranks_in_step(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pool.built.executor
    wanted = run_step(executor, plan(prompt(25, prompt_logprobs=1)), 1, None).sampled[0]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("sampling failed")

    for name in ("sample", "prompt_logprobs"):
        with monkeypatch.context() as patch:
            patch.setattr(executor._sampler, name, fail)
            with pytest.raises(ZeroDivisionError, match="sampling failed"):
                run_step(executor, plan(prompt(25, prompt_logprobs=1)), 1, None)
    again = run_step(executor, plan(prompt(25, prompt_logprobs=1)), 1, None).sampled[0]
    assert again.token_ids == wanted.token_ids
    assert len(again.prompt_logprobs) == 24
    assert [e.logprob for e in again.prompt_logprobs] == pytest.approx([e.logprob for e in wanted.prompt_logprobs])


def test_endpoints_of_all_ranks_behave_like_connectors(pool: Pool) -> None:
    source = LocalConnector()
    source.allocate(1 << 12, torch.device("cpu")).fill_(3)
    for item in pool.ranks:
        with pytest.raises(ConnectorError, match="not metadata"):
            item.endpoint.connect(b"nonsense", lambda payload: None)
        link = item.endpoint.connect(source.metadata(), lambda payload: None)
        assert link.transport == "local/shm"
        read = link.read(CopyTable.of([(0, 0, 1 << 10), (1 << 11, 1 << 10, 1 << 10)]))
        assert read.num_bytes == 1 << 11
        while (state := link.poll(read)) is ReadState.PENDING:
            pass
        assert state is ReadState.DONE
        with pytest.raises(ConnectorError, match="takes no payloads"):
            link.deliver(b"?")
        item.endpoint.accept("somebody", lambda payload: None)
        with pytest.raises(ConnectorError, match="takes no payloads"):
            item.endpoint.deliver("somebody", b"?")
        item.endpoint.dismiss("somebody")
        item.endpoint.progress()
        link.close()
        link.close()
    source.close()


def test_a_dead_rank_is_told_and_a_closed_executor_runs_nothing(folder: Path) -> None:
    before = set(children(os.getpid()))
    pool = Pool.load(folder, BLOCK, 40, 2, 1)
    pool.ranks[1].endpoint.expect_end()  # type: ignore[attr-defined]
    (rank,) = set(children(os.getpid())) - before
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RanksLost):
        run_step(pool.built.executor, plan(prompt(20)), 1, None)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        run_step(pool.built.executor, plan(prompt(20)), 1, None)
