"""What one engine step has to say, gathered: at most one ``RequestOutput`` per choice, one emit per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from twinpool.engine.block_pool import CacheEvents
from twinpool.engine.ports import RequestFailure, RequestOutput, StepOutputs
from twinpool.engine.request import FailureCode, Request, TokenLogprob
from twinpool.engine.stopping import Ending


class OutputCollector:
    """Collects between two ``take`` calls. Stats are copied, because outputs cross to another thread."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], RequestOutput] = {}
        self._failures: list[RequestFailure] = []
        self._loaded: list[tuple[int, int]] = []
        self._ended: list[tuple[int, int]] = []

    def tokens(
        self,
        request: Request,
        choice: int,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        ending: Ending | None,
    ) -> None:
        """New tokens of ``choice``, the first at output ``index``; merges with what the step said before."""
        key = (request.attempt_id, choice)
        output = self._outputs.get(key)
        is_first = index == request.num_prior_outputs
        if output is None:
            output = RequestOutput(request.origin, request.attempt_id, choice, index, [])
            self._outputs[key] = output
        output.token_ids += token_ids
        if logprobs:
            output.logprobs = [*output.logprobs, *logprobs]
        if ending is not None:
            output.finish = ending.reason
            output.stop_token_id = ending.stop_token_id
        if is_first or ending is not None:
            output.stats = dataclasses.replace(request.stats)
            admitted = request.admitted_at if request.admitted_at is not None else request.arrival
            output.queue_s = admitted - request.arrival
            first_token = request.first_token_at if request.first_token_at is not None else admitted
            output.prefill_s = first_token - admitted

    def prompt(self, request: Request, logprobs: Sequence[TokenLogprob]) -> None:
        """Log probabilities of the prompt, beside the first token of the request's own choice."""
        self._outputs[request.attempt_id, request.choice].prompt_logprobs = logprobs

    def fail(self, request: Request, code: FailureCode, message: str, field: str = "") -> None:
        """The attempt ends without finishing; what the step already said of its tokens stays."""
        self._failures.append(RequestFailure(request.origin, request.attempt_id, code, message, field))

    def loaded(self, request: Request) -> None:
        """The attempt's remote KV is confirmed."""
        self._loaded.append((request.origin, request.attempt_id))

    def ended(self, request: Request) -> None:
        """The attempt ended, and its outputs come from the prefill worker."""
        self._ended.append((request.origin, request.attempt_id))

    def forget(self, attempt_id: int) -> None:
        """Takes back what the step said of an attempt that was cancelled."""
        self._outputs = {key: output for key, output in self._outputs.items() if key[0] != attempt_id}
        self._loaded = [item for item in self._loaded if item[1] != attempt_id]

    def take(self, step: int, cache: CacheEvents) -> StepOutputs | None:
        """Hands everything over, with the cache's changes; None if there is nothing to say."""
        said = self._outputs or self._failures or self._loaded or self._ended
        if not (said or cache.stored or cache.removed or cache.reset):
            return None
        outputs = StepOutputs(
            step=step,
            outputs=list(self._outputs.values()),
            failures=self._failures,
            loaded=self._loaded,
            ended=self._ended,
            stored_hashes=cache.stored,
            removed_hashes=cache.removed,
            cache_reset=cache.reset,
        )
        self._outputs, self._failures, self._loaded, self._ended = {}, [], [], []
        return outputs
