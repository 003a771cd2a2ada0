"""One request's life, from dispatch to the last message.

1. ``chunks`` waits for the ticket's turn and dispatches the first attempt: ``Submit`` to both workers at once.
2. Outputs of both are merged per (choice, index): the first copy wins, so token 0 leaves as soon as the prefill worker
   has sampled it. Workers' news arrive from the sessions' receive loops and never wait for the client.
3. Whatever goes wrong with an attempt (session end, KV lost, drained, exhausted, internal error) ends it on both
   workers and starts a new one from (prompt_ids, output_ids) after a jittered pause, per choice once a choice has
   output. Bounded by the deadline and ``max_attempts``; the third crash of a worker that ran the request ends it.
4. The end (finished, error, cancelled by the client, deadline, a client that does not read) ends all attempts, stops
   the timers and releases the admission ticket, whether or not the client still listens.

The flow owns its attempts, its retry tasks, its timers and the ticket; ``close`` frees them all and is idempotent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from twinpool.config import Disaggregate, RouterSection
from twinpool.errors import Cancelled, DeadlineExceeded, InvalidRequest, TwinpoolError
from twinpool.router.admission import Ticket
from twinpool.router.attempt import Attempt, Leg, submission_for
from twinpool.router.choice import Choice
from twinpool.router.chunk import Chunk
from twinpool.router.journal import Journal
from twinpool.router.ledger import MAX_PAUSE_S, Ledger
from twinpool.router.messages import Failure, FailureCode, FinishReason, Output, Role
from twinpool.router.metrics import RouterMetrics
from twinpool.router.policy import FINAL, NoRoute, Obstacle, Route, RouteQuery
from twinpool.router.prompt_blocks import PromptBlocks
from twinpool.router.registry import Registry
from twinpool.router.request import ResolvedRequest
from twinpool.router.routing import Routing, error_for
from twinpool.router.summary import Clockings, Summary, summarize
from twinpool.router.text import ModelText

STALL_S = 30.0
"""A client that takes nothing for this long while there is something to take is cancelled."""
STATS_GRACE_S = 0.25
"""How long the last message waits for the prefill worker's account when decode was faster."""


@dataclass(frozen=True, slots=True)
class FlowContext:
    """What all flows of a router share."""

    config: RouterSection
    registry: Registry
    text: ModelText
    metrics: RouterMetrics
    routing: Routing
    journal: Journal


class Flow:
    """See the module docstring; made and used on the event loop's thread."""

    def __init__(
        self,
        request: ResolvedRequest,
        context: FlowContext,
        ticket: Ticket,
        arrival: float,
        deadline_s: float,
        mode: Disaggregate | None = None,
    ) -> None:
        """``arrival`` is on the loop's clock; ``deadline_s`` counts from it. ``mode`` None: as configured."""
        self.request = request
        self._context = context
        self._ticket = ticket
        self._mode: Disaggregate = mode or context.config.disaggregate
        self._loop = asyncio.get_running_loop()
        self._choices = [Choice(index, request, context.text) for index in range(request.n)]
        self._attempts: list[Attempt] = []
        self._retries: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._error: TwinpoolError | None = None
        self._closed = False
        self._arrival = arrival
        self._deadline = arrival + deadline_s
        self._deadline_timer = self._loop.call_at(self._deadline, self._on_deadline)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._consumer_waits = False
        self._dispatched = self._first_token = self._last_token = 0.0
        self._blocks: PromptBlocks | None = None
        self._ledger = Ledger(context.config.max_attempts)
        self._prompt_ids_sent = not request.want_token_ids

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Everything that the client gets, in order. Closing the iterator cancels the request.

        Raises:
            TwinpoolError: the request failed; what was delivered before stays valid.
        """
        request = self.request
        try:
            await self._ticket.turn(len(request.prompt_ids), request.stopping.max_tokens, request.n)
            if self._error is not None:
                raise self._error
            self._dispatch(range(request.n))
            while True:
                self._stop_stall_timer()
                self._consumer_waits = True
                await self._wake.wait()
                self._consumer_waits = False
                self._wake.clear()
                if self._error is not None:
                    raise self._error
                summary = None
                if all(choice.finish is not None for choice in self._choices):
                    await self._await_prefill_stats()
                    if self._error is not None:
                        raise self._error
                    summary = self._summarize()
                    self.close()
                for chunk in self._take(summary):
                    yield chunk
                if summary is not None:
                    return
        except TwinpoolError as error:
            self.cancel(error)
            raise
        finally:
            if not self._closed:
                self.cancel(Cancelled("the client cancelled"))

    def cancel(self, error: TwinpoolError) -> None:
        """Ends the request now with ``error``; ignored when it has ended. Both workers are told at once."""
        if self._closed:
            return
        self._error = error
        for attempt in self._attempts:
            attempt.cancel()
        self._context.metrics.ended(error.kind)
        self._context.journal.ended(self.request, self._arrival, self._loop.time(), error.kind, None)
        self.close()
        self._wake.set()

    def close(self) -> None:
        """Frees everything that the request holds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for attempt in self._attempts:
            attempt.close()
        for task in self._retries:
            task.cancel()
        self._deadline_timer.cancel()
        self._stop_stall_timer()
        self._ticket.release(sum(len(choice.token_ids) for choice in self._choices))

    # Dispatch

    def _dispatch(self, choices: Sequence[int]) -> None:
        """Starts one attempt for ``choices``, or raises what the client is to hear."""
        route = self._route(choices)
        if isinstance(route, NoRoute):
            raise error_for(route)
        self._submit(choices, route)

    def _route(self, choices: Sequence[int]) -> Route | NoRoute:
        longest = max(len(self._choices[choice].token_ids) for choice in choices)
        begun = any(choice.token_ids for choice in self._choices)
        query = RouteQuery(
            revision=self._attempts[-1].route.revision if begun else None,
            num_tokens=len(self.request.prompt_ids) + longest,
            mode=self._mode,
            avoid=frozenset(self._ledger.avoid),
            barred=frozenset(self._ledger.exhausted),
            is_retry=bool(self._attempts) and not self._ledger.exhausted,
            answer_tokens=self.request.stopping.max_tokens - longest,
        )
        if longest or self._blocks is None:  # choices that have output are continued one by one
            tokens = [*self.request.prompt_ids, *self._choices[choices[0]].token_ids]
            self._blocks = PromptBlocks(tokens, self.request.cache_salt)
        return self._context.routing.choose(query, self._blocks)

    def _submit(self, choices: Sequence[int], route: Route) -> None:
        registry = self._context.registry
        decode = registry.session_of(route.decode)
        prefill = None if route.prefill is None else registry.session_of(route.prefill)
        assert decode is not None  # the route comes from the same snapshot, and nothing awaited since
        base = {choice: len(self._choices[choice].token_ids) for choice in choices}
        attempt = Attempt(
            attempt_id=secrets.randbits(64) | 1,
            transfer_id=0 if prefill is None else secrets.randbits(64) | 1,
            choices=tuple(choices),
            base=base,
            route=route,
            decode=decode,
            prefill=prefill,
        )
        if not self._attempts:
            self._dispatched = self._loop.time()
        self._attempts.append(attempt)
        self._ledger.submitted(choices)
        self._context.metrics.routed(route)
        first = self._choices[attempt.choices[0]]
        submission = submission_for(attempt, self.request, first, self._deadline - self._loop.time())
        assert self._blocks is not None  # made for the route
        self._context.routing.sent(attempt, self._blocks)
        work = route.compute_tokens
        if prefill is not None:  # first: it makes the first token
            prefill.submit(submission, Leg(attempt, "prefill", self._on_output, self._on_failed, self._on_lost), work)
            work = 0
        if not attempt.ended:
            decode.submit(submission, Leg(attempt, "decode", self._on_output, self._on_failed, self._on_lost), work)

    # News from the workers

    def _on_output(self, attempt: Attempt, role: Role, output: Output) -> None:
        if attempt.ended or output.choice not in attempt.choices:
            return
        choice = self._choices[output.choice]
        if output.stats is not None:
            if attempt.is_first_account(role):
                self._context.routing.told(attempt, role, output.stats)
            attempt.stats[role, output.choice] = output.stats
        if output.prompt_logprobs:
            start = attempt.prompt_logprobs.get(output.choice, 0)
            attempt.prompt_logprobs[output.choice] = start + len(output.prompt_logprobs)
            choice.accept_prompt_logprobs(output.prompt_logprobs, start)
        if output.token_ids:
            if role == "prefill":
                attempt.prefilled.add(output.choice)
            elif output.index + len(output.token_ids) > attempt.base[output.choice] + 1:
                attempt.loaded = True
        was_finished = choice.finish is not None
        new = choice.accept(output)
        if new:
            self._count_tokens(new)
        if output.finish is FinishReason.CANCELLED and choice.finish is None:
            self._retry(attempt, "lost", f"{role} worker gave it up")
        elif choice.finish is not None and not was_finished:
            self._on_choice_end(attempt, choice)
        if choice.has_news or choice.finish is not None:
            self._notify()

    def _count_tokens(self, new: int) -> None:
        now = self._loop.time()
        if not self._first_token:
            self._first_token = now
            self._ticket.first_token()
            self._context.metrics.first_token(now - self._arrival)
        elif self._last_token:
            self._context.metrics.next_tokens(now - self._last_token, new)
        self._last_token = now

    def _on_choice_end(self, attempt: Attempt, choice: Choice) -> None:
        """A stop string is known only here: once no choice of the attempt goes on, the workers must stop."""
        siblings = [self._choices[index] for index in attempt.choices]
        if choice.stopped_by_text and all(sibling.finish is not None for sibling in siblings):
            attempt.cancel()

    def _on_failed(self, attempt: Attempt, role: Role, failure: Failure) -> None:
        if attempt.ended or self._is_over(attempt) or (role == "prefill" and self._needs_no_prefill(attempt)):
            return
        session = attempt.prefill if role == "prefill" else attempt.decode
        name = session.address if session is not None else role
        key = attempt.route.prefill if role == "prefill" else attempt.route.decode
        match failure.code:
            case FailureCode.INVALID:
                self.cancel(InvalidRequest(failure.message, failure.field))
                return
            case FailureCode.DEADLINE:
                self._on_deadline()
                return
            case FailureCode.EXHAUSTED if key is not None:
                self._ledger.exhausted.add(key)
            case FailureCode.INTERNAL:
                self._ledger.crashed(attempt.choices)
        if key is not None:
            self._ledger.avoid.add(key)
        self._retry(attempt, failure.code.value, f"{name}: {failure.message}")

    def _on_lost(self, attempt: Attempt, role: Role, reason: str, crashed: bool) -> None:
        if attempt.ended or self._is_over(attempt) or (role == "prefill" and self._needs_no_prefill(attempt)):
            return
        if crashed and attempt.was_running_on(role):
            self._ledger.crashed(attempt.choices)
        self._retry(attempt, "worker_lost", reason)

    def _needs_no_prefill(self, attempt: Attempt) -> bool:
        """Whether decode has the KV, and the client the prompt's log probabilities, which come from prefill alone."""
        return attempt.loaded and not any(self._choices[index].owes_prompt_logprobs for index in attempt.choices)

    def _is_over(self, attempt: Attempt) -> bool:
        return all(self._choices[choice].finish is not None for choice in attempt.choices)

    # Recovery

    def _retry(self, attempt: Attempt, label: str, reason: str) -> None:
        """The one recovery path: ends the attempt and starts anew from the tokens so far."""
        attempt.cancel()
        rest = [index for index in attempt.choices if not self._choices[index].finish_if_complete()]
        self._notify()
        if not rest:
            return
        verdict = self._ledger.verdict(rest, reason)
        if verdict is not None:
            self.cancel(verdict)
            return
        self._ledger.redispatches += 1
        self._context.metrics.redispatched(label)
        fresh = all(not self._choices[index].token_ids for index in rest)
        groups = [rest] if fresh and len(rest) == len(attempt.choices) else [[index] for index in rest]
        for group in groups:
            task = self._loop.create_task(self._dispatch_later(group))
            self._retries.add(task)
            task.add_done_callback(self._retries.discard)

    async def _dispatch_later(self, choices: Sequence[int]) -> None:
        """Waits for the pause and for a route; bounded by the deadline, whose timer cancels this task."""
        await asyncio.sleep(self._ledger.pause_s(choices))
        while isinstance(route := self._route(choices), NoRoute):
            started = any(choice.token_ids for choice in self._choices)
            if route.obstacle in FINAL or (route.obstacle is Obstacle.BARRED and not started):
                self.cancel(error_for(route))
                return
            if route.obstacle is Obstacle.BARRED:
                self._ledger.exhausted.clear()  # a started answer waits for room instead of being thrown away
                await asyncio.sleep(self._ledger.pause_s(choices) + MAX_PAUSE_S / 2)
            else:
                await self._context.registry.wait_changed()
        self._submit(choices, route)

    # Delivery

    def _notify(self) -> None:
        self._wake.set()
        if not self._consumer_waits and self._stall_timer is None and not self._closed:
            self._stall_timer = self._loop.call_later(STALL_S, self._on_stall)

    def _take(self, summary: Summary | None) -> list[Chunk]:
        ready = [choice for choice in self._choices if choice.has_news]
        chunks: list[Chunk] = []
        for choice in ready:
            piece = choice.take()
            finish = choice.finish if not choice.finish_delivered else None
            choice.finish_delivered = choice.finish is not None
            chunks.append(
                Chunk(
                    index=choice.index,
                    text="".join(piece.text),
                    token_ids=piece.token_ids if self.request.want_token_ids else (),
                    logprobs=piece.logprobs,
                    prompt_logprobs=piece.prompt_logprobs,
                    prompt_token_ids=() if self._prompt_ids_sent else self.request.prompt_ids,
                    finish=finish,
                    stop_reason=choice.stop_reason if finish is not None else None,
                    summary=summary if choice is ready[-1] else None,
                )
            )
            self._prompt_ids_sent = True
        return chunks

    async def _await_prefill_stats(self) -> None:
        """Decode's last message may overtake prefill's first; usage needs both."""
        if not self._attempts[-1].awaits_prefill_stats:
            return
        try:
            async with asyncio.timeout(STATS_GRACE_S):
                while self._attempts[-1].awaits_prefill_stats:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            return

    def _summarize(self) -> Summary:
        now = self._loop.time()
        self._context.metrics.ended("ok")
        times = Clockings(
            self._arrival, self._dispatched or now, self._first_token or now, self._last_token or now, now
        )
        tokens = sum(len(choice.token_ids) for choice in self._choices)
        if len(self._attempts) == 1:
            self._context.routing.answered(
                self._attempts[0], tokens // self.request.n, times.last_token - times.first_token
            )
        summary = summarize(self._attempts, len(self.request.prompt_ids), tokens, self._ledger.redispatches, times)
        self._context.metrics.finished(summary, self.request.n)
        self._context.journal.ended(self.request, self._arrival, now, "ok", summary)
        return summary

    # Timers

    def _on_deadline(self) -> None:
        allowed = self._deadline - self._arrival
        self.cancel(DeadlineExceeded(f"the request did not end within its deadline of {allowed:g} s"))

    def _on_stall(self) -> None:
        self.cancel(Cancelled(f"the client has read nothing for {STALL_S:g} s; read the stream as it comes"))

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
