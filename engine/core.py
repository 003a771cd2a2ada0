"""One engine: commands in, steps through the executor, outputs out. The same engine serves both pools.

``step``: drain commands -> deadlines -> schedule and launch until ``Executor.max_in_flight`` batches are in flight or
nothing is left to launch -> collect the oldest -> apply -> emit, all on one thread. What happens depends on commands
and the clock alone, not on how fast a batch is. It runs single-stepped with an injected clock (tests), or in ``run`` on
the engine's own thread, which blocks while there is nothing to do. Other threads call ``post``, ``post_many``, ``stop``
and ``load`` only.

An attempt's life: Submit -> (refused with INVALID) | queued -> computed or loaded -> outputs -> finished, failed,
held, or cancelled in any state; ``Attempts`` says how its blocks come back. If a step fails, its requests fail with
INTERNAL, and the engine goes on with the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twinpool.engine.attempts import Attempts
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.block_tables import BlockTables
from twinpool.engine.commands import (
    Cancel,
    CancelOrigin,
    Command,
    DestinationSafe,
    GrammarFailed,
    GrammarReady,
    HoldEnded,
    RemoteFinished,
    RemoteLoaded,
    RemoteLost,
    RemoteReadable,
    ResetPrefixCache,
    Submit,
)
from twinpool.engine.engine_config import EngineConfig
from twinpool.engine.errors import RanksLost
from twinpool.engine.exporter import Exporter
from twinpool.engine.outputs import OutputCollector
from twinpool.engine.plan import Executor, StepPlan, StepResult
from twinpool.engine.ports import Grammars, KVExports, KVImports, OutputSink, RolePolicy, Speculation
from twinpool.engine.postprocessor import Postprocessor
from twinpool.engine.remote_loads import RemoteLoads
from twinpool.engine.request import FailureCode, Request, RequestState
from twinpool.engine.scheduler import Blocker, Scheduler
from twinpool.engine.stopping import StopRules
from twinpool.engine.validation import problem

__all__ = ["Engine", "EngineConfig", "EngineLoad"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot after a step. Blocks exclude the null block; ``free_blocks`` include cached ones."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    held: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    queued_tokens: int = 0
    preemptions: int = 0
    batches: int = 0
    batch_requests: int = 0
    batch_tokens: int = 0
    batch_s: float = 0.0
    """Batches that were computed since start, their requests, tokens and seconds, summed up."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step. ``learns``: its time says something about drafts."""

    plan: StepPlan
    learns: bool
    began_at: float


class Engine:
    """Owns scheduler, blocks and requests; calls executor and ports on the thread that steps it."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        policy: RolePolicy,
        sink: OutputSink,
        exports: KVExports,
        imports: KVImports,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._policy = policy
        self._sink = sink
        self._exports = exports
        self._imports = imports
        self._clock = clock
        self._speculation = speculation
        self._grammars = grammars
        self._pool = BlockPool(executor.num_blocks)
        self._tables = BlockTables(self._pool, config.block_size, config.revision, config.prefix_caching)
        self._max_model_len = min(config.max_model_len, self._pool.num_usable * config.block_size)
        self._exporter = Exporter(exports, policy, executor.rank_layers, config.block_size, config.layer_groups)
        self._scheduler = Scheduler(
            config,
            self._max_model_len,
            self._tables,
            policy,
            self._exporter,
            imports,
            speculation,
            grammars,
            executor.max_in_flight,
        )
        self._outputs = OutputCollector()
        self._attempts = Attempts(self._scheduler, policy, exports, imports, grammars)
        rules = StopRules(config.eos_token_ids, self._max_model_len)
        self._postprocessor = Postprocessor(
            self._scheduler, self._attempts, self._outputs, policy, exports, rules, grammars
        )
        self._remote = RemoteLoads(self._scheduler, self._attempts, self._postprocessor, self._outputs)
        self._flights: deque[_Flight] = deque()
        self._landed_at = 0.0
        self._batches = self._batch_requests = self._batch_tokens = 0
        self._batch_s = 0.0
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._load = self._snapshot()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer: the model's limit, or what all blocks hold if that is less."""
        return self._max_model_len

    def post(self, command: Command) -> None:
        """Hands a command to the engine, from any thread; commands are handled in order."""
        self.post_many((command,))

    def post_many(self, commands: Iterable[Command]) -> None:
        """Like ``post``; the commands are handled before the same step."""
        with self._wake:
            self._inbox.extend(commands)
            self._wake.notify()

    def stop(self) -> None:
        """Makes ``run`` return after the step under way; requests are left as they are. From any thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def load(self) -> EngineLoad:
        """The newest snapshot, from any thread."""
        return self._load

    def run(self) -> None:
        """Steps until ``stop``; blocks while idle, at most until the next deadline.

        Raises:
            IntegrityError: an idle engine's books do not balance. The process must end: KV may be mixed up.
            RanksLost: see ``Executor``. The process must end.
        """
        checked = False
        while not self._stopping:
            if self.step():
                checked = False
                continue
            with self._wake:
                if self._inbox or self._stopping:
                    continue
                wait = self._idle_wait(checked)
                if self._wake.wait(wait) or checked:
                    continue
            if not self._inbox:
                self.check_integrity()
                checked = True

    def step(self) -> bool:
        """Runs one step. True if another may find something to do without new commands."""
        for command in self._drain():
            self._handle(command, self._clock())
        now = self._clock()
        for attempt_id in self._attempts.expired(now):
            self._fail(attempt_id, FailureCode.DEADLINE, "the deadline passed", now)
        moved = False
        while len(self._flights) < self._executor.max_in_flight:
            began_at = self._clock()
            plan = self._scheduler.schedule(now)
            for request, message in self._scheduler.faults:
                self._postprocessor.refuse(request, message, now)
            moved = moved or bool(plan.scheduled) or self._scheduler.preempted_last
            if not plan.scheduled:
                break
            self._launch(plan, began_at)
        if self._flights:
            self._land(self._flights.popleft())
        outputs = self._outputs.take(self._scheduler.step, self._pool.take_events())
        self._load = self._snapshot()
        if outputs is not None:
            self._sink.emit(outputs)
        busy = self._flights or self._scheduler.running or (moved and len(self._scheduler.waiting))
        return bool(self._inbox or busy)

    def check_integrity(self) -> None:
        """Compares the pool's books with those of all owners. Only on the stepping thread, between steps.

        Raises:
            IntegrityError: they differ.
        """
        self._pool.check_integrity(self._scheduler.owners() + self._attempts.owners())

    def _drain(self) -> list[Command]:
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _idle_wait(self, checked: bool) -> float | None:
        """Seconds to block: until the next deadline or, once, until the idle check; None blocks until woken."""
        deadline = self._attempts.next_deadline()
        waits = [] if deadline is None else [max(deadline - self._clock(), 0.0)]
        if not checked:
            waits.append(self._config.idle_check_s)
        return min(waits, default=None)

    def _handle(self, command: Command, now: float) -> None:
        match command:
            case Submit(request):
                self._submit(request, now)
            case Cancel(attempt_id):
                self._outputs.forget(attempt_id)
                self._attempts.abort(attempt_id, "cancelled", now)
            case CancelOrigin(origin):
                for attempt_id in self._attempts.of_origin(origin):
                    self._outputs.forget(attempt_id)
                    self._attempts.abort(attempt_id, "its session ended", now)
            case HoldEnded(transfer_id):
                self._hold_ended(transfer_id, now)
            case GrammarReady(attempt_id):
                root = self._attempts.root(attempt_id)
                if root is not None:
                    self._scheduler.unblock(root, Blocker.GRAMMAR)
            case GrammarFailed(attempt_id, message):
                self._fail(attempt_id, FailureCode.INVALID, message, now, field="structured_output")
            case ResetPrefixCache():
                self._pool.reset_cache()
            case RemoteReadable() | RemoteLoaded() | RemoteFinished() | RemoteLost() | DestinationSafe():
                self._remote.handle(command, now)

    def _submit(self, request: Request, now: float) -> None:
        if request.attempt_id in self._attempts:
            _log.warning("attempt %x is live already; a second Submit is ignored", request.attempt_id)
            return
        if request.transfer_id and self._attempts.has_transfer(request.transfer_id):
            message = f"exchange {request.transfer_id:x} is in use by another attempt"
            self._outputs.fail(request, FailureCode.INVALID, message, "transfer_id")
            return
        found = problem(request, self._config, self._max_model_len, self._grammars is not None)
        if found is not None:
            field, message = found
            self._outputs.fail(request, FailureCode.INVALID, message, field)
            if self._policy.holds(request):
                self._exports.refuse(request.transfer_id, message)
            elif self._policy.loads(request):
                self._imports.abandon(request.transfer_id)
            return
        if request.arrival == 0.0:
            request.arrival = now
        request.num_prior_outputs = len(request.output_ids)
        request.state_times[RequestState.WAITING] = now
        self._attempts.add(request)
        blockers: set[Blocker] = set()
        if self._policy.loads(request):
            blockers.add(Blocker.REMOTE_KV)
        if request.constraint is not None and self._grammars is not None:
            blockers.add(Blocker.GRAMMAR)
            self._grammars.compile(request, self.post)
        self._scheduler.submit(request, blockers)

    def _hold_ended(self, transfer_id: int, now: float) -> None:
        request = self._attempts.by_transfer(transfer_id)
        if request is None:
            return
        reason = "its hold ended before the prompt was computed"
        if request.state is not RequestState.HELD:
            self._outputs.fail(request, FailureCode.KV_LOST, reason)
        self._attempts.abort(request.attempt_id, reason, now, exchange_ended=True)

    def _fail(self, attempt_id: int, code: FailureCode, message: str, now: float, field: str = "") -> None:
        root = self._attempts.root(attempt_id)
        if root is None:
            return
        self._outputs.fail(root, code, message, field)
        self._attempts.abort(attempt_id, message, now)

    def _launch(self, plan: StepPlan, began_at: float) -> None:
        announcements = self._exporter.step(plan)
        learns = self._speculation is not None and all(entry.request.is_decoding for entry in plan.scheduled)
        self._flights.append(_Flight(plan, learns, began_at))
        self._executor.launch(plan, announcements.layer_groups, announcements.on_layers)

    def _land(self, flight: _Flight) -> None:
        plan = flight.plan
        try:
            result = self._executor.collect()
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001 - the device may fail in any way; other requests go on
            _log.exception("step %d failed", plan.step)
            now = self._landed_at = self._clock()
            for attempt_id in {entry.request.attempt_id for entry in plan.scheduled}:
                message = f"the step that computed it failed: {type(error).__name__}: {error}"
                self._fail(attempt_id, FailureCode.INTERNAL, message, now)
            self._scheduler.retire(plan, failed=True)
            return
        now = self._clock()
        # In a full pipeline a step costs what passes between two that land, not its own way through all stages.
        seconds = now - max(flight.began_at, self._landed_at)
        self._landed_at = now
        self._batches += 1
        self._batch_requests += len(plan.scheduled)
        self._batch_tokens += sum(entry.num_tokens for entry in plan.scheduled)
        self._batch_s += seconds
        if flight.learns:
            self._learn(plan, result, seconds)
        self._postprocessor.apply(plan, result, now)

    def _learn(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if self._speculation is None:
            return
        num_drafts = sum(entry.num_drafts for entry in plan.scheduled)
        num_accepted = sum(len(sampled.token_ids) for sampled in result.sampled) - len(plan.scheduled)
        self._speculation.end_step(len(plan.scheduled), num_drafts, num_accepted, seconds)

    def _snapshot(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            steps=scheduler.step,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.blocked),
            loading=len(scheduler.loading),
            held=len(scheduler.held),
            total_blocks=self._pool.num_usable,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            quarantined_blocks=self._attempts.num_quarantined_blocks,
            queued_tokens=scheduler.queued_tokens(),
            preemptions=scheduler.num_preemptions,
            batches=self._batches,
            batch_requests=self._batch_requests,
            batch_tokens=self._batch_tokens,
            batch_s=self._batch_s,
        )
