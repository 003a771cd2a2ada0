"""What follows a step: computed tokens are counted, sampled ones appended, choices forked, ended or held.

Per scheduled request, in this order: count (drafts that were rejected are taken back) -> append token by token with a
stop check after each (accepted drafts after the end are dropped) -> offer full blocks to the prefix cache -> end,
hold, or go on. Each choice ends exactly once. A partial prompt chunk says nothing. A constraint ends its choice with
the token that completes it, without an end token; one that refuses a token fails its attempt alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.engine.attempts import Attempts
from twinpool.engine.commands import FirstToken
from twinpool.engine.outputs import OutputCollector
from twinpool.engine.plan import Sampled, ScheduledRequest, StepPlan, StepResult
from twinpool.engine.ports import GrammarError, Grammars, KVExports, RolePolicy
from twinpool.engine.request import FailureCode, FinishReason, Request, RequestState, TokenLogprob
from twinpool.engine.scheduler import Scheduler
from twinpool.engine.stopping import Ending, StopRules


@dataclass(frozen=True, slots=True)
class _First:
    """First token of one choice, sampled here or on prefill."""

    choice: int
    token_id: int
    ending: Ending | None
    logprob: TokenLogprob | None

    def message(self) -> FirstToken:
        """What the decode worker is told."""
        return FirstToken(self.choice, self.token_id, self.ending.reason if self.ending else None, self.logprob)


class Postprocessor:
    """Applies step results and first tokens from prefill to requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        attempts: Attempts,
        outputs: OutputCollector,
        policy: RolePolicy,
        exports: KVExports,
        rules: StopRules,
        grammars: Grammars | None,
    ) -> None:
        self._scheduler = scheduler
        self._attempts = attempts
        self._outputs = outputs
        self._policy = policy
        self._exports = exports
        self._rules = rules
        self._grammars = grammars

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Applies a step and retires it.

        Raises:
            ValueError: the result does not match the plan.
        """
        for entry, sampled in zip(plan.scheduled, result.sampled, strict=True):
            if entry.request.state is RequestState.RUNNING:
                try:
                    self._apply(entry, sampled, now)
                except GrammarError as error:
                    self.refuse(entry.request, str(error), now)
        self._scheduler.retire(plan)

    def refuse(self, request: Request, message: str, now: float) -> None:
        """The attempt's constraint can go no further."""
        self._outputs.fail(request, FailureCode.INVALID, message, "structured_output")
        self._attempts.abort(request.attempt_id, message, now)

    def start(self, request: Request, first_tokens: Sequence[FirstToken], now: float) -> None:
        """A request whose prompt is loaded goes on from the tokens that prefill sampled; its stop checks stand.

        Raises:
            ValueError: ``first_tokens`` does not hold one token per choice.
        """
        wanted = range(request.choice, request.choice + request.sampling.n)
        by_choice = {first.choice: first for first in first_tokens}
        if sorted(by_choice) != list(wanted) or len(first_tokens) != len(wanted):
            raise ValueError(f"first tokens of choices {sorted(by_choice)} came, {list(wanted)} were asked for")
        firsts: list[_First] = []
        for choice in wanted:
            first = by_choice[choice]
            firsts.append(_First(choice, first.token_id, self._ended_there(request, first), first.logprob))
        request.first_token_at = now
        self._say(request, firsts)
        try:
            self._go_on(request, firsts, now)
        except GrammarError as error:
            self.refuse(request, str(error), now)

    def _apply(self, entry: ScheduledRequest, sampled: Sampled, now: float) -> None:
        request = entry.request
        if request.is_decoding:
            self._scheduler.advance(entry, len(sampled.token_ids))
            self._append(request, sampled, now)
            return
        request.stats.computed_tokens += entry.num_tokens
        if request.num_computed_tokens == 0:
            request.prompt_logprobs = []
        if request.num_new_outputs == 0:
            request.prompt_logprobs += sampled.prompt_logprobs
        self._scheduler.advance(entry, len(sampled.token_ids))
        if not entry.samples:
            self._scheduler.tables.commit(request)
        elif request.num_new_outputs == 0:
            self._first(request, sampled, now)
        else:
            self._append(request, sampled, now)

    def _first(self, request: Request, sampled: Sampled, now: float) -> None:
        """The prompt is computed here: one sampled token per choice."""
        self._scheduler.tables.commit(request)
        num_outputs, num_tokens = len(request.output_ids) + 1, request.num_tokens + 1
        firsts: list[_First] = []
        for offset, token_id in enumerate(sampled.token_ids):
            ending = self._ending(request, token_id, num_outputs, num_tokens)
            logprob = sampled.logprobs[offset] if sampled.logprobs else None
            firsts.append(_First(request.choice + offset, token_id, ending, logprob))
        request.first_token_at = now
        self._say(request, firsts)
        if not self._policy.holds(request):
            self._go_on(request, firsts, now)
            return
        self._exports.final(request.transfer_id, request.num_tokens, [first.message() for first in firsts])
        if all(first.ending is not None for first in firsts):
            self._attempts.finish(request, now)
        else:
            self._scheduler.hold(request, now)

    def _say(self, request: Request, firsts: Sequence[_First]) -> None:
        for first in firsts:
            logprobs = [first.logprob] if first.logprob is not None else []
            index = request.num_prior_outputs
            self._outputs.tokens(request, first.choice, index, [first.token_id], logprobs, first.ending)
        if request.prompt_logprobs:
            self._outputs.prompt(request, request.prompt_logprobs)
            request.prompt_logprobs = []

    def _go_on(self, request: Request, firsts: Sequence[_First], now: float) -> None:
        """Choices that did not end with their first token go on; forks first, while the blocks are still there."""
        for first in firsts[1:]:
            if first.ending is None:
                self._fork(request, first.choice, first.token_id, now)
        if firsts[0].ending is None:
            self._append_first(request, firsts[0].token_id)
        else:
            self._attempts.finish(request, now)

    def _append(self, request: Request, sampled: Sampled, now: float) -> None:
        """Tokens of a generating request; those after its end are dropped."""
        output_ids, token_ids = request.output_ids, sampled.token_ids
        index = num_outputs = len(output_ids)
        num_tokens = request.num_tokens
        ending: Ending | None = None
        for token_id in token_ids:
            output_ids.append(token_id)
            num_outputs += 1
            num_tokens += 1
            ending = self._ending(request, token_id, num_outputs, num_tokens)
            if ending is not None:
                token_ids = output_ids[index:]
                break
            if request.constraint is not None:
                self._accept(request, token_id)
        logprobs = sampled.logprobs and sampled.logprobs[: len(token_ids)]
        self._outputs.tokens(request, request.choice, index, token_ids, logprobs, ending)
        self._scheduler.tables.commit(request)
        if ending is not None:
            self._attempts.finish(request, now)

    def _append_first(self, request: Request, token_id: int) -> None:
        request.output_ids.append(token_id)
        self._accept(request, token_id)

    def _ended_there(self, request: Request, first: FirstToken) -> Ending | None:
        """The ending that prefill decided, with the stop token that did it, if one did."""
        if first.finish is None:
            return None
        here = self._rules.check(request.stop, first.token_id, len(request.output_ids) + 1, request.num_tokens + 1)
        return here if here is not None and here.reason is first.finish else Ending(first.finish)

    def _ending(self, request: Request, token_id: int, num_outputs: int, num_tokens: int) -> Ending | None:
        """Whether ``token_id`` ends the choice, by a stop rule or by completing its constraint; counts include it."""
        ending = self._rules.check(request.stop, token_id, num_outputs, num_tokens)
        if ending is not None or self._grammars is None or request.constraint is None:
            return ending
        return Ending(FinishReason.STOP) if self._grammars.completes(request, token_id) else None

    def _accept(self, request: Request, token_id: int) -> None:
        if self._grammars is not None and request.constraint is not None:
            self._grammars.accept(request, [token_id])

    def _fork(self, source: Request, choice: int, token_id: int, now: float) -> None:
        """Another choice of ``source``, which has not appended its own first token yet."""
        target = dataclasses.replace(
            source,
            choice=choice,
            output_ids=list(source.output_ids),
            state=RequestState.WAITING,
            state_times={},
            num_computed_tokens=0,
            block_ids=[],
            draft_ids=[],
            stats=dataclasses.replace(source.stats),
            last_step=0,
            block_hashes=[],
            prompt_logprobs=[],
            num_cached_blocks=0,
        )
        self._attempts.add(target)
        if self._grammars is not None and source.constraint is not None:
            self._grammars.fork(source, target)
        self._append_first(target, token_id)
        self._scheduler.fork(source, target, now)
