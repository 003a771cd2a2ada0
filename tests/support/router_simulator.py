"""Workers without computation under the real routing: policy, learner, prefix indexes, in simulated seconds.

A worker is a loop of steps like the engine's: one token per stream, and prompts in chunks under a budget; a step takes
``step_s`` and so much per token and stream. Caches are LRU over blocks; the router hears of changes and of load only as
late as it would in service. Everything is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from twinpool.router.attempt import Attempt
from twinpool.router.backlog import Backlog
from twinpool.router.messages import LinkReport, Report, Stats, WorkerInfo
from twinpool.router.policy import Mode, Route, RouteQuery, WorkerView
from twinpool.router.prefix_index import PrefixIndex
from twinpool.router.prompt_blocks import PromptBlocks
from twinpool.router.routing import Routing

BLOCK = 16
CHUNK, STEP_TOKENS, LOCAL_BUDGET = 512, 2048, 256
REPORT_S, EVENTS_S, WAY_S = 0.25, 0.05, 0.001


@dataclass(frozen=True, slots=True)
class Speed:
    """What a step costs, in seconds; ``handover_s`` is the wait for a copy after the prefill."""

    step_s: float = 0.02
    token_s: float = 0.001
    stream_s: float = 0.002
    handover_s: float = 0.01


@dataclass(slots=True)
class Ask:
    """One request: when, what, and how long its answer is; ``answer`` continues the prompt in the next turn."""

    at: float
    prompt: list[int]
    answer: list[int]
    ttft: float = 0.0
    computed: int = 0
    done_at: float = 0.0
    route: Route | None = None

    @property
    def pace(self) -> float:
        """Seconds per token after the first."""
        return (self.done_at - self.at - self.ttft) / max(len(self.answer) - 1, 1)


@dataclass(slots=True)
class _Job:
    """A request at a worker: tokens to compute, then tokens to say (decode)."""

    ask: Ask
    left: int
    say: int
    on_first: Callable[[_Job], None]
    number: int
    names: Sequence[int] = ()
    cached: int = 0
    started: bool = False


class SimWorker:
    """Stands for a worker and for the router's session with it."""

    usable = True

    def __init__(self, sim: Simulator, role: str, index: int, speed: Speed, num_blocks: int) -> None:
        name = f"{role}-{index}"
        self.info = WorkerInfo(
            name, 1, 1, role, "m", "r", "l", "l", BLOCK, num_blocks, 1 << 20, 64, "", "local", 1 << 20
        )
        self.prefixes = PrefixIndex(num_blocks)
        self.backlog = Backlog()
        self.report = Report(free_blocks=num_blocks)
        self.links: tuple[LinkReport, ...] = ()
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.jobs: list[_Job] = []
        self.computed = 0
        self._sim, self._speed = sim, speed
        self._busy = False
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def view(self) -> WorkerView:
        sent = self.backlog
        return WorkerView(
            self.info, self.report, False, sent.requests, sent.tokens, sent.kv_tokens, self.prefixes.num_known
        )

    def submit(self, job: _Job) -> None:
        self.jobs.append(job)
        if not self._busy:
            self._step()

    def hits(self, names: Sequence[int], most: int) -> int:
        """Tokens of the longest cached prefix."""
        count = next((i for i, name in enumerate(names[:most]) if name not in self.cache), min(most, len(names)))
        return count * BLOCK

    def store(self, names: Sequence[int]) -> None:
        for name in reversed(names):  # the deepest is the oldest
            if name not in self.cache:
                self._stored[name] = None
                self._removed.pop(name, None)
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.info.num_blocks:
            name, _ = self.cache.popitem(last=False)
            if name in self._stored:
                del self._stored[name]
            else:
                self._removed[name] = None

    def tell_events(self) -> None:
        self.prefixes.apply(False, list(self._stored), list(self._removed))
        self._stored, self._removed = {}, {}

    def tell_load(self) -> None:
        prompts = [job for job in self.jobs if job.left]
        self.report = Report(
            running=len(self.jobs) - len(prompts),
            waiting=len(prompts),
            free_blocks=self.info.num_blocks,
            queued_tokens=sum(job.left for job in prompts),
            links=self.links,
        )
        self.backlog.reported()

    def _step(self) -> None:
        streams = [job for job in self.jobs if not job.left]
        budget = LOCAL_BUDGET if streams and self.info.role == "decode" else STEP_TOKENS
        parts: list[tuple[_Job, int]] = []
        for job in self.jobs:
            if job.left and budget and not job.started:
                self._start(job)
            if job.left and budget:
                parts.append((job, min(job.left, CHUNK, budget)))
                budget -= parts[-1][1]
        self._busy = bool(streams or parts)
        if not self._busy:
            return
        tokens = sum(part for _, part in parts)
        speed = self._speed
        seconds = speed.step_s + speed.token_s * tokens + speed.stream_s * len(streams)
        self._sim.after(seconds, lambda: self._end(streams, parts))

    def _start(self, job: _Job) -> None:
        job.started = True
        job.cached = self.hits(job.names, (len(job.ask.prompt) - 1) // BLOCK)
        job.left = job.ask.computed = len(job.ask.prompt) - job.cached

    def _end(self, streams: Sequence[_Job], parts: Sequence[tuple[_Job, int]]) -> None:
        for job in streams:
            job.say -= 1
            if not job.say:
                self._finish(job)
        for job, part in parts:
            job.left -= part
            self.computed += part
            self.store(job.names[: (len(job.ask.prompt) - job.left) // BLOCK])
            if not job.left:
                self.backlog.computed(job.number)
                job.say = max(job.say - 1, 0)
                job.on_first(job)
                if not job.say:
                    self._finish(job)
        self._step()

    def _finish(self, job: _Job) -> None:
        self.jobs.remove(job)
        self.backlog.ended(job.number)
        if self.info.role == "decode":
            self.store(self._sim.blocks(job.ask.prompt + job.ask.answer[:-1]).of(self.info))
            self._sim.answered(job)


@dataclass
class Simulator:
    """``prefill`` x ``decode`` workers and one router; ``run`` serves and returns the asks, in order of arrival."""

    prefill: int = 1
    decode: int = 1
    mode: Mode = "always"
    speed: Speed = Speed()
    speeds: dict[str, Speed] = field(default_factory=dict)
    num_blocks: int = 4096
    pace_weight: float = 0.25
    spread: Callable[[Simulator, RouteQuery], Route] | None = None
    """Takes the policy's place, to compare with."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.routes: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers = itertools.count(), itertools.count(1)
        self._open = 0
        self._then: dict[int, Callable[[], None]] = {}
        self._attempts: dict[int, Attempt] = {}
        roles = ["prefill"] * self.prefill + ["decode"] * self.decode
        indices = [*range(self.prefill), *range(self.decode)]
        self.workers = [
            SimWorker(self, role, index, self.speeds.get(f"{role}-{index}", self.speed), self.num_blocks)
            for role, index in zip(roles, indices, strict=True)
        ]
        links = tuple(LinkReport(w.info.worker_id, 1, True) for w in self.workers if w.info.role == "prefill")
        for worker in self.workers:
            worker.links = links if worker.info.role == "decode" else ()
            worker.tell_load()
        self.routing = Routing(cast(Any, self), self.pace_weight, lambda: self.now)

    # What Routing asks of a registry

    @property
    def sessions(self) -> list[SimWorker]:
        return self.workers

    def views(self) -> list[WorkerView]:
        return [worker.view() for worker in self.workers]

    # Time

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what))

    def run(self, conversations: Sequence[Sequence[Ask]]) -> list[Ask]:
        """Each conversation is a chain: the next ask comes its ``at`` seconds after the answer to the one before."""
        asks = [ask for turns in conversations for ask in turns]
        self._open = len(asks)
        for turns in conversations:
            self._chain(list(turns), first=True)
        self._ticker(REPORT_S, lambda worker: worker.tell_load())
        self._ticker(EVENTS_S, lambda worker: worker.tell_events())
        while self._open:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return sorted(asks, key=lambda ask: ask.at)

    def blocks(self, tokens: Sequence[int]) -> PromptBlocks:
        return PromptBlocks(tokens, "")

    def _chain(self, turns: list[Ask], first: bool) -> None:
        ask = turns.pop(0)
        if turns:
            self._then[id(ask)] = lambda: self._chain(turns, first=False)
        self.after(ask.at, lambda: self._ask(ask))

    def _ticker(self, every_s: float, tell: Callable[[SimWorker], None]) -> None:
        def tick() -> None:
            for worker in self.workers:
                tell(worker)
            self.after(every_s, tick)

        self.after(every_s, tick)

    # Requests

    def _ask(self, ask: Ask) -> None:
        ask.at = self.now
        names = self.blocks(ask.prompt)
        query = RouteQuery(len(ask.prompt), self.mode, answer_tokens=len(ask.answer))
        route = self.routing.choose(query, names) if self.spread is None else self.spread(self, query)
        assert isinstance(route, Route), route
        ask.route = route
        by_key = {worker.view().key: worker for worker in self.workers}
        decode = by_key[route.decode]
        prefill = None if route.prefill is None else by_key[route.prefill]
        self.routes["local" if prefill is None else "remote"] += 1
        number = next(self._numbers)
        attempt = Attempt(number, 0, (0,), {0: 0}, route, cast(Any, decode), cast(Any, prefill))
        self._attempts[id(ask)] = attempt
        self.routing.sent(attempt, names)
        for worker in (prefill, decode):
            if worker is not None:
                work = route.compute_tokens if worker is (prefill or decode) else 0
                worker.backlog.sent(number, 1, work, len(ask.prompt))
        computes = prefill or decode

        def arrive() -> None:
            own = names.of(computes.info)
            left = len(ask.prompt) - computes.hits(own, (len(ask.prompt) - 1) // BLOCK)
            say = len(ask.answer) if prefill is None else 1
            computes.submit(_Job(ask, left, say, self._first, number, own))

        self.after(WAY_S, arrive)

    def _first(self, job: _Job) -> None:
        ask, attempt = job.ask, self._attempts[id(job.ask)]

        def heard() -> None:
            ask.ttft = self.now - ask.at
            role = "decode" if attempt.prefill is None else "prefill"
            self.routing.told(attempt, cast(Any, role), Stats(cached_tokens=job.cached, computed_tokens=ask.computed))

        self.after(WAY_S, heard)
        if attempt.prefill is None:
            return
        decode = cast(SimWorker, attempt.decode)
        speed = self.speed

        def copied() -> None:
            self.routing.told(attempt, "decode", Stats(exposed_transfer_s=speed.handover_s, remote_tokens=1))
            decode.store(self.blocks(ask.prompt).of(decode.info))
            if len(ask.answer) > 1:
                decode.submit(_Job(ask, 0, len(ask.answer) - 1, self._first, job.number))
            else:
                self.answered(job)

        self.after(speed.handover_s, copied)

    def answered(self, job: _Job) -> None:
        ask = job.ask
        ask.done_at = self.now
        self.routing.answered(self._attempts.pop(id(ask)), len(ask.answer), self.now - ask.at - ask.ttft)
        self._open -= 1
        then = self._then.pop(id(ask), None)
        if then is not None:
            then()


def perfect_tokens(asks: Sequence[Ask], answers: bool = False) -> int:
    """Prompt tokens that one worker which never forgets would compute, serving the asks one after the other.

    ``answers``: it also keeps the KV of answers (a decode worker does, a prefill worker does not).
    """
    held: set[int] = set()
    info = WorkerInfo("w", 1, 1, "prefill", "m", "r", "l", "l", BLOCK, 1, 1, 1, "", "", 1)
    total = 0
    for ask in asks:
        names = PromptBlocks(ask.prompt, "").of(info)
        most = (len(ask.prompt) - 1) // BLOCK
        hits = next((i for i, name in enumerate(names[:most]) if name not in held), min(most, len(names)))
        total += len(ask.prompt) - hits * BLOCK
        held.update(PromptBlocks(ask.prompt + ask.answer[:-1], "").of(info) if answers else names)
    return total


def mean_ttft(asks: Sequence[Ask]) -> float:
    return statistics.fmean(ask.ttft for ask in asks)
