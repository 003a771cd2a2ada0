# Over 400 lines: two engines and the exchange between them, stepped by one clock; a split would hide the order.
"""Two real engines joined by the real exchange, in one thread: what the pools do, single-stepped and fast.

Executors run tiny models in float32; hold table and import table talk through queues; the local connector copies; time
is a number. ``turn`` steps both engines once, delivers what was said and polls both tables, so that every run of a
test is the same. Without a prefill pool the decode engine serves alone: the monolithic reference.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch

from twinpool.config import Config, EngineSection, ModelConfig, PoolSection, RaySection, TransportSection
from twinpool.decode_worker.policy import DecodePolicy
from twinpool.decode_worker.translate import first_token
from twinpool.engine import commands
from twinpool.engine.core import Engine, EngineConfig
from twinpool.engine.executor import BuiltExecutor, build_executor
from twinpool.engine.grammar import LLGuidanceGrammars
from twinpool.engine.no_exchange import NoExports, NoImports
from twinpool.engine.ports import OutputSink, RequestFailure, Speculation, StepOutputs
from twinpool.engine.request import (
    Constraint,
    FailureCode,
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    StopParams,
    TokenLogprob,
)
from twinpool.engine.sampler import Sampler
from twinpool.kv_transfer.connectors.local import LocalConnector
from twinpool.kv_transfer.events import Event, Finished, LinkDown, LinkUp, Loaded, Lost, Readable, Safe
from twinpool.kv_transfer.holds import HoldLimits, HoldTable
from twinpool.kv_transfer.imports import ImportLimits, ImportTable, SourceRank
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import FromDecode, FromPrefill
from twinpool.prefill_worker.policy import PrefillPolicy
from twinpool.prefill_worker.worker import ExportsPort
from twinpool.worker.rank_group import RankGroup
from twinpool.worker.startup import make_launcher

CPU = torch.device("cpu")
PEER_D, PEER_P = "decode", "prefill"


class Grammars(LLGuidanceGrammars):
    """Compiles on its threads, but ``compile`` waits for the outcome: the engine's steps are the same every time."""

    def compile(self, request: Request, post: Callable[[commands.Command], None]) -> None:
        outcome: queue.Queue[commands.Command] = queue.Queue()
        super().compile(request, outcome.put)
        post(outcome.get(timeout=60))


@dataclass(frozen=True)
class Pool:
    """An executor and its KV regions, for one engine after the other; KV of earlier engines stays in them as garbage.

    Ranks other than 0 are real processes, of the cluster that ``ray`` names if it is given.
    """

    built: BuiltExecutor
    group: RankGroup
    ranks: Sequence[RankEndpoint]

    @classmethod
    def load(
        cls,
        folder: Path,
        block_size: int,
        num_blocks: int,
        tp_size: int = 1,
        pp_size: int = 1,
        ray: RaySection | None = None,
    ) -> Pool:
        section = EngineSection(block_size=block_size, num_blocks=num_blocks)
        launcher: Literal["local", "ray"] = "local" if ray is None else "ray"
        config = Config(
            model=ModelConfig(path=str(folder), dtype="float32", device="cpu"),
            decode=PoolSection(tp_size=tp_size, pp_size=pp_size, engine=section, launcher=launcher),
            transport=TransportSection(connector="local"),
            ray=ray or RaySection(),
        )
        group = RankGroup(config.decode, make_launcher(config, "decode", config.decode))
        group.join(config, "decode", folder, CPU)
        connector = LocalConnector()
        built = build_executor(
            folder,
            dtype="float32",
            device=CPU,
            block_size=block_size,
            num_blocks=num_blocks,
            allocate=connector.allocate,
            make_sampler=Sampler,
            followers=group,
        )
        endpoints = [connector, *group.endpoints(lambda rank: pytest.fail(f"rank {rank} ended"))]
        ranks = [RankEndpoint(rank, built.shard.layout_of(rank), endpoint) for rank, endpoint in enumerate(endpoints)]
        return cls(built, group, ranks)

    def close(self) -> None:
        self.built.executor.close()
        self.group.close()
        self.ranks[0].endpoint.close()


@dataclass(frozen=True)
class Ask:
    """A request, as a router would dispatch it. ``output`` are tokens of earlier attempts."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: StopParams = field(default_factory=lambda: StopParams(12, ignore_eos=True))
    constraint: Constraint | None = None
    salt: str = ""
    choice: int = 0
    output: tuple[int, ...] = ()

    def request(self, attempt_id: int, transfer_id: int) -> Request:
        return Request(
            attempt_id,
            self.prompt,
            self.sampling,
            self.stop,
            choice=self.choice,
            output_ids=list(self.output),
            constraint=self.constraint,
            cache_salt=self.salt,
            transfer_id=transfer_id,
        )


@dataclass
class Answer:
    """What was said of one choice on either pool, merged by output index as a router does."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def said(self) -> tuple[list[int], FinishReason | None, int | None]:
        return self.tokens, self.finish, self.stop_token_id


class Sink(OutputSink):
    """What one engine said."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, int], Answer] = {}
        self.stats: dict[tuple[int, int], RequestStats] = {}
        self.failures: dict[int, RequestFailure] = {}
        self.stored: list[bytes] = []

    def emit(self, outputs: StepOutputs) -> None:
        self.stored += outputs.stored_hashes
        for output in outputs.outputs:
            key = (output.attempt_id, output.choice)
            answer = self.answers.setdefault(key, Answer())
            assert answer.finish is None, "tokens after the end"
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish, answer.stop_token_id = output.finish, output.stop_token_id
            if output.stats is not None:
                self.stats[key] = output.stats
        for failure in outputs.failures:
            assert failure.attempt_id not in self.failures, "an attempt fails once"
            self.failures[failure.attempt_id] = failure


class Pair:
    """A deployment of one or two pools; see the module. ``prefill`` None: the decode pool serves alone."""

    def __init__(
        self,
        decode: Pool,
        prefill: Pool | None = None,
        *,
        grammars: Mapping[str, LLGuidanceGrammars] | None = None,
        speculation: Speculation | None = None,
        caching: bool = True,
        chunk: int = 512,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        revision: str = "r",
    ) -> None:
        self.now = 1000.0
        self._pools = (decode, prefill)
        self._next_id = 0
        self._asks: dict[int, Ask] = {}
        self._to_prefill: deque[FromDecode] = deque()
        self._to_decode: deque[FromPrefill] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self.events: list[Event] = []
        self.decode_sink, self.prefill_sink = Sink(), Sink()
        clock = lambda: self.now  # noqa: E731 - one expression, used five times
        config = EngineConfig(
            max_model_len=decode.built.max_model_len,
            vocab_size=decode.built.config.vocab_size,
            revision=revision,
            eos_token_ids=decode.built.config.eos_ids,
            block_size=decode.built.layout.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_chunk=chunk,
            prefix_caching=caching,
        )
        grammars = grammars or {}
        # Other ranks read in their own time, not in turns: no limit, and pauses while they do.
        self._pauses = any(pool is not None and len(pool.ranks) > 1 for pool in self._pools)
        limits = ImportLimits(read_timeout_s=1e9 if self._pauses else 20.0, warm_up_bytes=0)
        self.table = ImportTable(decode.ranks, limits, self._on_event, clock)
        self.decode = Engine(
            config,
            decode.built.executor,
            DecodePolicy(64),
            self.decode_sink,
            NoExports(),
            self if prefill is not None else NoImports(),
            clock,
            speculation,
            grammars.get("decode"),
        )
        self.prefill: Engine | None = None
        if prefill is not None:
            self.holds = HoldTable(
                HoldLimits(), lambda _, message: self._to_decode.append(message), self._hold_ended, lambda: None, clock
            )
            self.prefill = Engine(
                config,
                prefill.built.executor,
                PrefillPolicy(),
                self.prefill_sink,
                ExportsPort(self.holds),
                NoImports(),
                clock,
                None,
                grammars.get("prefill"),
            )
            self.link()

    # engine.ports.KVImports: posted to the table, as a worker does

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        self._posted.append(partial(self.table.reserved, transfer_id, first_block, tuple(block_ids)))

    def abandon(self, transfer_id: int) -> None:
        self._posted.append(partial(self.table.abandon, transfer_id))

    # Links

    def link(self) -> None:
        """Joins the pools."""
        pool = self._pools[1]
        assert pool is not None
        self.holds.session_began(PEER_D)
        num_blocks = pool.built.num_blocks
        sources = [SourceRank(r.rank, r.layout, r.endpoint.metadata(), num_blocks) for r in pool.ranks]
        self.table.link(PEER_P, 1, sources, self._to_prefill.append)
        for _ in range(10_000 if self._pauses else 10):
            if any(isinstance(event, LinkUp) for event in self.events):
                return
            self._exchange()
        raise AssertionError("the link does not come up")

    def cut(self) -> None:
        """The session between the pools ends, at both ends; what was under way is lost."""
        self._to_prefill.clear()
        self._to_decode.clear()
        self.table.unlink(PEER_P, "cut")
        self.holds.session_ended(PEER_D)
        self.events.clear()

    # Requests

    def ask(self, ask: Ask, where: str = "both") -> int:
        """Dispatches; ``where`` is both, prefill or decode. Returns the attempt's id."""
        self._next_id += 1
        attempt = self._next_id
        self._asks[attempt] = ask
        transfer = attempt if where == "both" and self.prefill is not None else 0
        if self.prefill is not None and where != "decode":
            if transfer:
                self.holds.expect(transfer)
            self.prefill.post(commands.Submit(ask.request(attempt, transfer)))
        if where != "prefill":
            self.decode.post(commands.Submit(ask.request(attempt, transfer)))
            if transfer:
                self._posted.append(partial(self.table.open, transfer, PEER_P))
        return attempt

    def cancel(self, attempt: int) -> None:
        for engine in self.engines:
            engine.post(commands.Cancel(attempt))

    @property
    def engines(self) -> list[Engine]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    def answers(self, attempt: int) -> list[Answer]:
        """One per choice; both pools must have said the same of the first token."""
        ask = self._asks[attempt]
        answers = []
        for choice in range(ask.choice, ask.choice + ask.sampling.n):
            mine = self.decode_sink.answers.get((attempt, choice))
            first = self.prefill_sink.answers.get((attempt, choice))
            if mine is not None and first is not None:
                assert first.tokens == mine.tokens[:1]
                assert first.logprobs == mine.logprobs[:1]
                mine = replace(mine, prompt_logprobs=mine.prompt_logprobs or first.prompt_logprobs)
            answer = mine or first
            assert answer is not None, f"nothing was said of choice {choice}: {self.failure(attempt)}"
            answers.append(answer)
        return answers

    def failure(self, attempt: int) -> RequestFailure | None:
        return self.decode_sink.failures.get(attempt) or self.prefill_sink.failures.get(attempt)

    def serve(self, asks: Sequence[Ask], where: str = "both") -> list[list[Answer]]:
        """Asks all at once and drains; one list of choices per ask."""
        attempts = [self.ask(ask, where) for ask in asks]
        self.drain()
        return [self.answers(attempt) for attempt in attempts]

    # Steps

    def turn(self) -> bool:
        """One step of each engine and a round of the exchange. True while something is under way."""
        self.now += 0.01
        moved = [engine.step() for engine in self.engines]
        for engine in self.engines:
            engine.check_integrity()
        return self._exchange() or any(moved)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.turn() and self.idle:
                return
        raise AssertionError("the pools do not come to rest")

    @property
    def idle(self) -> bool:
        loads = [engine.load() for engine in self.engines]
        return not any(load.running + load.waiting + load.loading + load.held for load in loads)

    def assert_empty(self) -> None:
        for engine in self.engines:
            load = engine.load()
            assert (load.running, load.waiting, load.loading, load.held) == (0, 0, 0, 0)
            assert (load.free_blocks, load.quarantined_blocks) == (load.total_blocks, 0)
            engine.check_integrity()
        if self.prefill is not None:
            assert self.holds.stats.open == 0
            assert self.table.stats.open_exchanges == 0

    def close(self) -> None:
        self.table.close()

    def _exchange(self) -> bool:
        moved = bool(self._posted or self._to_prefill or self._to_decode)
        while self._posted:
            self._posted.popleft()()
        while self._to_prefill:
            message = self._to_prefill.popleft()
            self.holds.receive(PEER_D, message)  # type: ignore[arg-type]  # the local connector sends no payloads
        while self._to_decode:
            self.table.receive(PEER_P, self._to_decode.popleft())
        self.table.poll(self.now)
        if self.prefill is not None:
            self.holds.poll(self.now)
        if self._pauses and not moved:
            time.sleep(0.0005)
        return moved

    def _hold_ended(self, transfer_id: int) -> None:
        assert self.prefill is not None
        self.prefill.post(commands.HoldEnded(transfer_id))

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Readable(transfer_id):
                self.decode.post(commands.RemoteReadable(transfer_id))
            case Loaded():
                firsts = tuple(first_token(first) for first in event.first_tokens)
                times = (event.transfer_s, event.exposed_transfer_s)
                loaded = commands.RemoteLoaded(event.transfer_id, firsts, *times, event.transfer_bytes, event.transport)
                self.decode.post(loaded)
            case Finished(transfer_id):
                self.decode.post(commands.RemoteFinished(transfer_id))
            case Lost(transfer_id, reason):
                self.decode.post(commands.RemoteLost(transfer_id, FailureCode.KV_LOST, reason))
            case Safe(transfer_id):
                self.decode.post(commands.DestinationSafe(transfer_id))
            case LinkUp() | LinkDown():
                pass


@contextmanager
def pair(decode: Pool, prefill: Pool | None = None, **settings: object) -> Iterator[Pair]:
    """A ``Pair`` that must end empty."""
    deployment = Pair(decode, prefill, **settings)  # type: ignore[arg-type]
    try:
        yield deployment
        deployment.drain()
        deployment.assert_empty()
    finally:
        deployment.close()


class Oracle:
    """Drafts what the reference says, with every third token wrong; implements ``engine.ports.Proposer``."""

    def __init__(self, outputs: Mapping[tuple[str, int, int], Sequence[int]], num_drafts: int = 4) -> None:
        """``outputs`` by (salt, prompt length, choice)."""
        self._outputs = outputs
        self._num_drafts = num_drafts

    def propose(self, request: Request) -> list[int]:
        key = (request.cache_salt, len(request.prompt_ids), request.choice)
        known = len(request.output_ids)
        future = list(self._outputs.get(key, ()))[known : known + self._num_drafts]
        return [token if (known + i) % 3 else (token + 1) % 200 for i, token in enumerate(future)]
