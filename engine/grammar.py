"""Structured output through llguidance: compiled constraints, matchers, token bitmasks.

Life of a matcher, one per (attempt, choice):

1. ``compile`` (engine thread) hands the constraint to a small pool of threads. There it is parsed (llguidance drops the
   GIL), taken from a cache of recent constraints if it is known, and advanced over the tokens of earlier attempts;
   then GrammarReady or GrammarFailed is posted.
2. ``rows`` looks ahead over drafts and rolls back; ``accept`` alone advances. Engine thread, no waiting.
3. ``fork`` copies a matcher for another choice.
4. ``completes`` says that the output is complete with one more token.
5. ``release`` forgets the matcher; a compilation under way then posts nothing.
6. ``close`` ends the threads.

End tokens are allowed only where the output so far satisfies the constraint. Special tokens and ids beyond the
tokenizer's vocabulary (padding of the model's) are never allowed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import llguidance
import numpy as np
import tokenizers
import torch

from twinpool.engine.commands import Command, GrammarFailed, GrammarReady
from twinpool.engine.ports import GrammarError
from twinpool.engine.request import Constraint, Request

_CACHED_CONSTRAINTS = 128
_MAX_MESSAGE = 500
# Without a bound a model may write white space for ever: the grammar would never force the answer on.
_JSON_DEFAULTS = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,32}"}


@dataclass(slots=True)
class _Entry:
    """A matcher, or the compilation that will give one."""

    future: Future[llguidance.LLMatcher]
    released: bool = False


class LLGuidanceGrammars:
    """Implements ``ports.Grammars``. All methods but ``close`` belong to the engine thread."""

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_ids: frozenset[int],
        threads: int = 2,
        max_lexer_states: int = 50_000,
    ) -> None:
        """Reads ``tokenizer_json`` (a Hugging Face tokenizer.json) in the background.

        ``vocab_size`` is the width of the logits. A tokenizer that cannot be read fails every constraint, by message.
        ``max_lexer_states`` bounds one constraint's memory (1 to 2 kB a state); beyond it the request fails.
        """
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._limits = llguidance.LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(_read_tokenizer, tokenizer_json, vocab_size, eos_ids)

    def compile(self, request: Request, post: Callable[[Command], None]) -> None:
        """See ``ports.Grammars``. ``post`` is called on a thread of the pool.

        Raises:
            ValueError: the request has no constraint.
        """
        if request.constraint is None:
            raise ValueError(f"attempt {request.attempt_id:x} has no constraint")
        attempt_id = request.attempt_id
        future = self._pool.submit(self._build, request.constraint, tuple(request.output_ids))
        entry = _Entry(future)
        self._entries[attempt_id, request.choice] = entry

        def tell(done: Future[llguidance.LLMatcher]) -> None:
            if entry.released or done.cancelled():
                return
            error = done.exception()
            post(GrammarReady(attempt_id) if error is None else GrammarFailed(attempt_id, _one_line(str(error))))

        future.add_done_callback(tell)

    def fork(self, source: Request, target: Request) -> None:
        """See ``ports.Grammars``."""
        future: Future[llguidance.LLMatcher] = Future()
        future.set_result(self._matcher(source).deep_copy())
        self._entries[target.attempt_id, target.choice] = _Entry(future)

    def rows(self, request: Request, draft_ids: Sequence[int]) -> torch.Tensor:
        """See ``ports.Grammars``."""
        matcher = self._matcher(request)
        num_words = (self._vocab_size + 31) // 32
        masks = np.full((1 + len(draft_ids), num_words), -1, dtype=np.int32)
        num_consumed = 0
        for i in range(len(masks)):
            masks[i] = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[:num_words]
            if i == len(draft_ids) or draft_ids[i] in self._eos_ids:
                break
            if matcher.try_consume_tokens([draft_ids[i]]) == 0:
                break
            num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return torch.from_numpy(masks)

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        """See ``ports.Grammars``."""
        _advance(self._matcher(request), token_ids)

    def completes(self, request: Request, token_id: int) -> bool:
        """See ``ports.Grammars``."""
        matcher = self._matcher(request)
        _advance(matcher, [token_id])
        stopped = bool(matcher.is_stopped())
        matcher.rollback(1)
        return stopped

    def release(self, request: Request) -> None:
        """See ``ports.Grammars``."""
        entry = self._entries.pop((request.attempt_id, request.choice), None)
        if entry is not None:
            entry.released = True
            entry.future.cancel()

    def close(self) -> None:
        """Ends the threads after the compilations that have begun. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        """Matchers held, compilations included."""
        return len(self._entries)

    def _matcher(self, request: Request) -> llguidance.LLMatcher:
        entry = self._entries.get((request.attempt_id, request.choice))
        if entry is None or not entry.future.done():
            raise GrammarError(f"attempt {request.attempt_id:x} choice {request.choice} has no compiled constraint")
        return entry.future.result()

    def _build(self, constraint: Constraint, output_ids: Sequence[int]) -> llguidance.LLMatcher:
        tokenizer = self._tokenizer.result()
        with self._lock:
            known = self._compiled.get(constraint)
            if known is not None:
                self._compiled.move_to_end(constraint)
        if known is None:
            known = llguidance.LLMatcher(tokenizer, grammar_text(constraint), log_level=0, limits=self._limits)
            if known.is_error():
                raise GrammarError(f"{constraint.kind}: {known.get_error()}")
            with self._lock:
                self._compiled[constraint] = known
                if len(self._compiled) > _CACHED_CONSTRAINTS:
                    self._compiled.popitem(last=False)
        matcher = known.deep_copy()
        _advance(matcher, output_ids)
        return matcher


def grammar_text(constraint: Constraint) -> str:
    """llguidance's form of a constraint. Nothing is compiled yet.

    Raises:
        GrammarError: the kind is unknown or the source is not of its kind.
    """
    source = constraint.source
    try:
        if constraint.kind == "json_schema":
            return str(llguidance.LLMatcher.grammar_from_json_schema(source, defaults=_JSON_DEFAULTS))
        if constraint.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(source))
        if constraint.kind == "grammar":
            return str(llguidance.LLMatcher.grammar_from_lark(source))
        if constraint.kind == "choice":
            choices = json.loads(source)
            if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
                raise GrammarError("choice: expected a JSON list of at least one string")
            # Not a rule of Lark's: its strings take no control characters, and a parser row no more than 2000 items.
            return str(llguidance.LLMatcher.grammar_from_regex("|".join(map(_as_regex, choices))))
    except ValueError as error:
        raise GrammarError(f"{constraint.kind}: {error}") from error
    raise GrammarError(f"{constraint.kind}: unknown kind; use json_schema, regex, grammar or choice")


def _as_regex(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _read_tokenizer(path: Path, vocab_size: int, eos_ids: frozenset[int]) -> llguidance.LLTokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every bad or missing file
        raise GrammarError(f"cannot read tokenizer {path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(eos_ids) or None)


def _advance(matcher: llguidance.LLMatcher, token_ids: Sequence[int]) -> None:
    num_consumed = matcher.try_consume_tokens(list(token_ids))
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))
    if num_consumed < len(token_ids):
        raise GrammarError(f"token {token_ids[num_consumed]} at {num_consumed} does not follow the constraint")


def _one_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
