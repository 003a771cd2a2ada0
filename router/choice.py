"""One answer of a request: its tokens in order, their text, and what is not delivered yet.

1. ``accept`` takes outputs of any attempt, keeps the first copy of each (index) and ignores the rest.
2. Tokens go through the detokeniser and the stop strings; what may be shown waits in the pending piece, which grows
   until the client takes it: a slow client gets fewer, larger pieces.
3. A finish reason, a stop string or a limit ends the choice, once; what comes later is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinpool.router.detokenizer import Detokenizer
from twinpool.router.messages import FinishReason, Output, TokenLogprob
from twinpool.router.request import ResolvedRequest
from twinpool.router.stop_strings import StopStrings
from twinpool.router.text import ModelText


@dataclass(slots=True)
class Piece:
    """What a client has not seen yet of a choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Choice:
    """See the module docstring."""

    def __init__(self, index: int, request: ResolvedRequest, text: ModelText) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.prompt_logprobs_seen = 0
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or the id of the stop token that ended it; None at the end of sequence and at a limit."""
        self.finish_delivered = False
        self.pending = Piece()
        self._request = request
        self._eos_ids = frozenset[int]() if request.stopping.ignore_eos else text.eos_ids
        self._end_ids = frozenset(request.stopping.stop_token_ids) | self._eos_ids
        self._detokenizer = Detokenizer(text.tokenizer, request.prompt_ids)
        self._stop = StopStrings(request.stopping.stop, request.stopping.include_stop)
        self._ahead: dict[int, Output] = {}

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended it, of which no worker knows."""
        return self._stop.matched is not None

    def accept(self, output: Output) -> int:
        """Adds what is new in ``output``; returns the number of tokens that were."""
        before = len(self.token_ids)
        if self.finish is None and (output.token_ids or output.finish is not None):
            self._ahead_or_now(output)
        return len(self.token_ids) - before

    def accept_prompt_logprobs(self, logprobs: Sequence[TokenLogprob], start: int) -> None:
        """Adds a piece whose first entry is number ``start``; known entries are ignored."""
        new = logprobs[max(self.prompt_logprobs_seen - start, 0) :]
        self.pending.prompt_logprobs.extend(new)
        self.prompt_logprobs_seen += len(new)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether the client still waits for log probabilities of the prompt; they come with the first choice alone."""
        request = self._request
        wanted = request.prompt_logprobs is not None and self.index == 0
        return wanted and self.prompt_logprobs_seen < len(request.prompt_ids) - 1

    def finish_if_complete(self) -> bool:
        """Ends the choice when its tokens alone say that it is complete; checked before a new attempt."""
        stopping = self._request.stopping
        if self.finish is None and self.token_ids:
            last = self.token_ids[-1]
            if last in self._end_ids and len(self.token_ids) > stopping.min_tokens:
                self._end(FinishReason.STOP, last)
            elif len(self.token_ids) >= stopping.max_tokens:
                self._end(FinishReason.LENGTH)
        return self.finish is not None

    def take(self) -> Piece:
        """Hands out what is pending and starts anew."""
        piece, self.pending = self.pending, Piece()
        return piece

    @property
    def has_news(self) -> bool:
        """Whether there is anything that a client would notice."""
        piece = self.pending
        shown = piece.text or piece.prompt_logprobs or (self.finish is not None and not self.finish_delivered)
        wanted = piece.token_ids and (self._request.want_token_ids or self._request.logprobs is not None)
        return bool(shown or wanted)

    def _ahead_or_now(self, output: Output) -> None:
        if output.index > len(self.token_ids):
            self._ahead[output.index] = output
            return
        self._append(output)
        while self._ahead and self.finish is None:
            first = min(self._ahead)
            if first > len(self.token_ids):
                return
            self._append(self._ahead.pop(first))

    def _append(self, output: Output) -> None:
        known = len(self.token_ids) - output.index
        tokens = output.token_ids
        for position in range(known, len(tokens)):
            is_end = output.finish is FinishReason.STOP and position == len(tokens) - 1
            logprob = output.logprobs[position] if position < len(output.logprobs) else None
            self._append_token(tokens[position], logprob, is_end and self._is_end(tokens[position], output))
            if self.finish is not None:
                return
        if output.finish is not None and output.finish is not FinishReason.CANCELLED and known <= len(tokens):
            self._end(output.finish, output.stop_token_id)

    def _is_end(self, token_id: int, output: Output) -> bool:
        return token_id == output.stop_token_id or token_id in self._end_ids

    def _append_token(self, token_id: int, logprob: TokenLogprob | None, ends: bool) -> None:
        """``ends``: the token stopped the choice; it stays in the ids but is not text."""
        self.token_ids.append(token_id)
        self.pending.token_ids.append(token_id)
        if logprob is not None:
            self.pending.logprobs.append(logprob)
        if not ends or self._request.stopping.include_stop:
            self._show(self._detokenizer.push(token_id))

    def _show(self, text: str) -> None:
        if not text:
            return
        if len(self.token_ids) > self._request.stopping.min_tokens:
            text = self._stop.push(text)
        if text:
            self.pending.text.append(text)
        if self._stop.matched is not None:
            self.finish, self.stop_reason = FinishReason.STOP, self._stop.matched

    def _end(self, reason: FinishReason, token_id: int | None = None) -> None:
        self._show(self._detokenizer.flush())
        if self.finish is None:
            rest = self._stop.flush()
            if rest:
                self.pending.text.append(rest)
            self.finish, self.stop_reason = reason, None if token_id in self._eos_ids else token_id
