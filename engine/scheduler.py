"""Which requests compute what in a step, and who waits. There is no prefill or decode mode, only catching up.

A step, in order:

1. Running requests, those that generate first. One that lacks a block preempts the lowest priority, youngest
   request (perhaps itself): its blocks are freed, its tokens kept, and it is recomputed later. Requests whose KV is
   promised are never preempted: they own all blocks from admission on.
2. Admissions, unless something was preempted. The head is asked for (``can_allocate``) before anything changes, and
   a head that does not fit is not skipped. Requests that wait for remote KV or a grammar are not in the queue yet.
   Room is one joint question: new blocks plus one growth block per running or loading choice must be free, unless
   nothing runs or loads. Remote requests get their blocks (LOADING) without costing tokens.

With ``max_in_flight`` above 1, steps are scheduled while others are in flight: their requests are left alone, neither
scheduled nor preempted, and a step takes an equal share of the rest, so that every step of the pipeline has work. One
that lacks a block while the victim is in flight waits, and nothing is admitted meanwhile. Blocks return to the pool
when the last launched step that writes them has retired (``Retirement``).
"""

from __future__ import annotations

import enum
from collections import Counter

import torch

from twinpool.engine.block_tables import BlockTables
from twinpool.engine.engine_config import EngineConfig
from twinpool.engine.exporter import Exporter
from twinpool.engine.plan import ScheduledRequest, StepPlan
from twinpool.engine.ports import GrammarError, Grammars, KVImports, RolePolicy, Speculation
from twinpool.engine.request import Request, RequestState
from twinpool.engine.retirement import Retirement
from twinpool.engine.step_budget import StepBudget
from twinpool.engine.waiting_queue import WaitingQueue, rank

_Chosen = dict[Request, ScheduledRequest]


class Blocker(enum.Enum):
    """What a submitted request waits for before it joins the queue."""

    REMOTE_KV = "remote KV"
    GRAMMAR = "grammar"


class Scheduler:
    """Queues, batches and blocks of one engine. ``max_model_len`` is the longest prompt plus answer it can hold."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        tables: BlockTables,
        policy: RolePolicy,
        exporter: Exporter,
        imports: KVImports,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        max_in_flight: int = 1,
    ) -> None:
        self.tables = tables
        self.waiting = WaitingQueue()
        self.blocked: dict[Request, set[Blocker]] = {}
        self.running: list[Request] = []
        self.loading: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self.preempted_last = False
        self.num_preemptions = 0
        self._starved = False
        self._prompts: list[Request] = []
        """Running requests that the last step found catching up."""
        self.faults: list[tuple[Request, str]] = []
        """Requests whose grammar failed in ``schedule``, and why: left out of the plan, for the engine to end."""
        self._config = config
        self._max_model_len = max_model_len
        self._policy = policy
        self._exporter = exporter
        self._imports = imports
        self._speculation = speculation
        self._grammars = grammars
        self._max_in_flight = max_in_flight
        self._sequence = 0
        self._steps = Retirement(tables.pool)

    @property
    def step(self) -> int:
        """Number of the last launched step."""
        return self._steps.launched

    def submit(self, request: Request, blockers: set[Blocker]) -> None:
        """Queues a request, behind ``blockers`` if there are any."""
        self._sequence += 1
        request.sequence = self._sequence
        if blockers:
            self.blocked[request] = blockers
        else:
            self._enqueue(request, resumed=False)

    def unblock(self, request: Request, blocker: Blocker) -> None:
        """One reason to wait is gone. Idempotent."""
        blockers = self.blocked.get(request)
        if blockers is None:
            return
        blockers.discard(blocker)
        if not blockers:
            del self.blocked[request]
            self._enqueue(request, resumed=False)

    def schedule(self, now: float) -> StepPlan:
        """Plans a step; with nothing to compute the plan is empty, is not launched, and keeps the last number."""
        decoding: list[Request] = []
        self._prompts = []
        num_decoding = 0
        retired = self._steps.retired
        for request in self.running:
            if not request.is_decoding:
                self._prompts.append(request)
                continue
            num_decoding += 1
            if request.last_step <= retired:
                decoding.append(request)
        del decoding[self._share(num_decoding) :]
        num_prompts = self._share(len(self._prompts) + len(self.waiting))
        prompts = [request for request in self._prompts if request.last_step <= retired][:num_prompts]
        total = self._config.max_num_batched_tokens
        budget = StepBudget(
            tokens=total,
            prompt=min(total, self._policy.prompt_budget(num_decoding, total)),
            drafts=total - len(decoding),
            admissions=num_prompts - len(prompts),
        )
        chosen: _Chosen = {}
        self.preempted_last = False
        self._starved = False
        self.faults = []
        if self._speculation is not None:
            self._speculation.begin_step(len(decoding))
        for request in decoding:
            if request.state is RequestState.RUNNING:
                self._generate(request, budget, chosen, now)
        for request in prompts:
            if request.state is RequestState.RUNNING:
                self._compute(request, budget, chosen, now)
        if len(self.waiting) and not (self.preempted_last or self._starved):
            self._admit(budget, chosen, now)
        return self._launch(chosen, now)

    def advance(self, entry: ScheduledRequest, num_sampled: int) -> None:
        """Counts what a step computed for one request; rejected drafts are taken back."""
        request = entry.request
        request.num_computed_tokens += entry.num_tokens
        if entry.num_drafts:
            accepted = min(max(num_sampled - 1, 0), entry.num_drafts)
            request.num_computed_tokens -= entry.num_drafts - accepted
            request.stats.draft_tokens += entry.num_drafts
            request.stats.accepted_tokens += accepted
            request.draft_ids = []

    def retire(self, plan: StepPlan, failed: bool = False) -> None:
        """No rank writes for ``plan`` any more: deferred blocks are freed. Steps retire in order."""
        self._steps.retire(plan.step, failed)

    def fork(self, source: Request, target: Request, now: float) -> None:
        """Starts another choice with the computed tokens of ``source``; without room it waits to be recomputed."""
        seats = len(self.running) + len(self.loading)
        num_tokens = source.num_computed_tokens
        if seats >= self._config.max_num_seqs or not self.tables.can_fork(num_tokens):
            self._enqueue(target, resumed=True)
            return
        copy = self.tables.fork(source, target, num_tokens)
        if copy is not None:
            self._steps.copy_later(copy)
        target.set_state(RequestState.RUNNING, now)
        self.running.append(target)

    def loaded(self, request: Request, now: float) -> None:
        """Remote KV is confirmed: all known tokens count as computed, full blocks are cached, the request runs."""
        del self.loading[request.transfer_id]
        request.num_computed_tokens = request.num_tokens
        self.tables.commit(request)
        request.set_state(RequestState.RUNNING, now)
        self.running.append(request)

    def hold(self, request: Request, now: float) -> None:
        """The prompt is computed and promised: the blocks stay, the seat is free."""
        self.running.remove(request)
        request.set_state(RequestState.HELD, now)
        self.held[request.transfer_id] = request

    def discard(self, request: Request, now: float) -> list[int]:
        """Takes a request out of wherever it is, FINISHED. Returns its blocks if they were LOADING, else frees them."""
        quarantined: list[int] = []
        match request.state:
            case RequestState.WAITING:
                if self.blocked.pop(request, None) is None:
                    self.waiting.remove(request)
            case RequestState.LOADING:
                del self.loading[request.transfer_id]
                quarantined, request.block_ids = request.block_ids, []
            case RequestState.RUNNING:
                self.running.remove(request)
            case RequestState.HELD:
                del self.held[request.transfer_id]
            case RequestState.FINISHED:
                pass
        request.set_state(RequestState.FINISHED, now)
        self._steps.release(request)
        return quarantined

    def owners(self) -> Counter[int]:
        """References per block as requests, copies and deferred frees count them."""
        count = self._steps.owners()
        for request in [*self.running, *self.loading.values(), *self.held.values()]:
            count.update(request.block_ids)
        return count

    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed here or are being computed."""
        blocked = sum(self._work(request) for request in self.blocked)
        prompts = [r for r in self._prompts if r.state is RequestState.RUNNING and not r.is_decoding]
        running = sum(request.num_tokens - request.num_computed_tokens for request in prompts)
        return self.waiting.num_tokens + blocked + running

    def _enqueue(self, request: Request, resumed: bool) -> None:
        work = self._work(request)
        hits = self.tables.match(request, (request.num_tokens - 1) // self.tables.block_size) if work else ()
        self.waiting.push(request, resumed, work - len(hits) * self.tables.block_size)

    def _work(self, request: Request) -> int:
        """Tokens to compute here before the request generates, when nothing of it is cached."""
        return 0 if self._is_remote(request) else request.num_tokens

    def _is_remote(self, request: Request) -> bool:
        return request.num_new_outputs == 0 and self._policy.loads(request)

    def _width(self, request: Request) -> int:
        """Choices that the request will run as."""
        if request.num_new_outputs > 0 or self._policy.holds(request):
            return 1
        return request.sampling.n

    def _share(self, count: int) -> int:
        """What one step takes of ``count`` requests, so that ``max_in_flight`` steps have equal work."""
        return -(-count // self._max_in_flight)

    def _growth(self, request: Request) -> int:
        return 0 if self._policy.holds(request) else self._width(request)

    def _generate(self, request: Request, budget: StepBudget, chosen: _Chosen, now: float) -> None:
        """One token more, and drafts. The path of most requests in most steps."""
        if budget.tokens < 1 or not self._make_room(request, request.num_computed_tokens + 1, budget, chosen, now):
            return
        if self._speculation is None:
            budget.tokens -= 1
            chosen[request] = ScheduledRequest(request, 1, True)
            return
        request.draft_ids = drafts = self._draft(request, budget)
        entry = chosen[request] = ScheduledRequest(request, 1 + len(drafts), True, 1, len(drafts))
        budget.spend(entry, decoding=True)

    def _compute(self, request: Request, budget: StepBudget, chosen: _Chosen, now: float) -> None:
        """The next chunk of known tokens."""
        left = request.num_tokens - request.num_computed_tokens
        num = min(left, budget.tokens, self._config.prefill_chunk, budget.prompt)
        if num > 0 and self._make_room(request, request.num_computed_tokens + num, budget, chosen, now):
            self._choose(request, num, budget, chosen)

    def _make_room(self, request: Request, num_tokens: int, budget: StepBudget, chosen: _Chosen, now: float) -> bool:
        """Grows the table to ``num_tokens`` tokens, at the expense of others or, failing that, of the request."""
        if num_tokens <= len(request.block_ids) * self.tables.block_size:
            return True
        while not self.tables.can_allocate(request, num_tokens):
            victim = max((r for r in self.running if not self._policy.holds(r)), key=rank)
            if self._steps.in_flight(victim):
                self._starved = True
                return False
            entry = chosen.pop(victim, None)
            if entry is not None:
                budget.spend(entry, victim.is_decoding, sign=-1)
            self._preempt(victim, now)
            if victim is request:
                return False
        self.tables.grow(request, num_tokens)
        return True

    def _draft(self, request: Request, budget: StepBudget) -> list[int]:
        """Drafts that fit tokens, limits and, without preempting or starving anyone, blocks."""
        if self._speculation is None:
            return []
        room = min(
            budget.drafts,
            request.stop.max_tokens - len(request.output_ids) - 1,
            self._max_model_len - request.num_tokens - 1,
        )
        if room <= 0:
            return []
        drafts = self._speculation.propose(request)[:room]
        if not drafts:
            return []
        if self.tables.can_allocate(request, request.num_tokens + len(drafts), headroom=len(self.running)):
            self.tables.grow(request, request.num_tokens + len(drafts))
            return drafts
        return drafts[: len(request.block_ids) * self.tables.block_size - request.num_tokens]

    def _admit(self, budget: StepBudget, chosen: _Chosen, now: float) -> None:
        occupied = [*self.running, *self.loading.values()]
        seats = sum(self._width(request) for request in occupied)
        growth = sum(self._growth(request) for request in occupied)
        while len(self.waiting):
            request = self.waiting.head()
            alone = not self.running and not self.loading
            if not alone and seats + self._width(request) > self._config.max_num_seqs:
                return
            if not self._start(request, 0 if alone else growth + self._growth(request), budget, chosen, now):
                return
            seats += self._width(request)
            growth += self._growth(request)

    def _start(self, request: Request, headroom: int, budget: StepBudget, chosen: _Chosen, now: float) -> bool:
        """Admits the head if its blocks and at least one token fit."""
        block_size = self.tables.block_size
        remote = self._is_remote(request)
        if remote:
            hits = self.tables.match(request, request.num_tokens // block_size)
            num, reserve = 0, request.num_tokens
        else:
            skip = request.sampling.prompt_logprobs is not None and request.num_new_outputs == 0
            hits = [] if skip else self.tables.match(request, (request.num_tokens - 1) // block_size)
            left = request.num_tokens - len(hits) * block_size
            num = min(left, self._config.prefill_chunk, budget.tokens, budget.prompt)
            if num <= 0 or budget.admissions <= 0:
                return False
            budget.admissions -= 1
            reserve = max(self._policy.reserve_tokens(request), len(hits) * block_size + num)
        if not self.tables.can_allocate(request, reserve, hits, headroom):
            return False
        self.waiting.remove(request)
        self.tables.admit(request, reserve, hits)
        if request.admitted_at is None:
            request.admitted_at = now
            request.stats.cached_tokens = len(hits) * block_size
        if remote:
            request.set_state(RequestState.LOADING, now)
            self.loading[request.transfer_id] = request
            self._imports.reserved(request.transfer_id, len(hits), tuple(request.block_ids[len(hits) :]))
            return True
        request.set_state(RequestState.RUNNING, now)
        self.running.append(request)
        self._prompts.append(request)
        self._exporter.admitted(request, len(hits))
        self._choose(request, num, budget, chosen)
        return True

    def _choose(self, request: Request, num_tokens: int, budget: StepBudget, chosen: _Chosen) -> None:
        samples = request.num_computed_tokens + num_tokens == request.num_tokens
        num_samples = request.sampling.n if samples and request.num_new_outputs == 0 else 1
        entry = chosen[request] = ScheduledRequest(request, num_tokens, samples, num_samples)
        budget.spend(entry, decoding=False)

    def _preempt(self, request: Request, now: float) -> None:
        self.running.remove(request)
        request.set_state(RequestState.WAITING, now)
        request.num_computed_tokens = 0
        request.draft_ids = []
        request.stats.preemptions += 1
        self.num_preemptions += 1
        self._steps.release(request)
        self._enqueue(request, resumed=True)
        self.preempted_last = True

    def _launch(self, chosen: _Chosen, now: float) -> StepPlan:
        self._steps.drop_dead_copies()
        allowed = self._masks(chosen)
        if not chosen:
            return StepPlan(self._steps.launched, ())
        step, copies = self._steps.launch()
        plan = StepPlan(step, list(chosen.values()), copies)
        for index, request in enumerate(chosen):
            request.launched(step, now)
            if allowed and request in allowed:
                plan.allowed[index] = allowed[request]
        return plan

    def _masks(self, chosen: _Chosen) -> dict[Request, torch.Tensor]:
        """Bitmasks of those that sample under a constraint; those whose constraint fails leave ``chosen``."""
        allowed: dict[Request, torch.Tensor] = {}
        if self._grammars is None:
            return allowed
        for request, entry in list(chosen.items()):
            if entry.samples and request.constraint is not None:
                try:
                    allowed[request] = self._grammars.rows(request, request.draft_ids)
                except GrammarError as error:
                    del chosen[request]
                    self.faults.append((request, str(error)))
        return allowed
