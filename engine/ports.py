"""What an engine needs from the outside: small interfaces that workers implement and tests script.

All methods are called on the engine thread and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from twinpool.engine.commands import Command, FirstToken
from twinpool.engine.request import FailureCode, FinishReason, Request, RequestStats, TokenLogprob


@dataclass(slots=True)
class RequestOutput:
    """New tokens of one choice in one step. ``index`` is the output index of the first token in ``token_ids``.

    ``stats`` and the three durations (seconds) are set with the attempt's first token here and with its finish.
    """

    origin: int
    attempt_id: int
    choice: int
    index: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    stats: RequestStats | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """An attempt that ended without finishing. ``field`` names the request field at fault for INVALID."""

    origin: int
    attempt_id: int
    code: FailureCode
    message: str
    field: str = ""


@dataclass(slots=True)
class StepOutputs:
    """Everything one engine step has to say.

    ``loaded`` holds (origin, attempt_id) of confirmed copies, ``ended`` of attempts that ended without a word here: the
    prefill worker says it all.
    """

    step: int
    outputs: list[RequestOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    loaded: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    stored_hashes: list[bytes] = field(default_factory=list)
    removed_hashes: list[bytes] = field(default_factory=list)
    cache_reset: bool = False


class OutputSink(Protocol):
    """Takes step outputs; implementations hop to asyncio once per step."""

    def emit(self, outputs: StepOutputs) -> None:
        """Takes ownership of ``outputs``."""


class ReadyEvent(Protocol):
    """Proves that a kernel has written: ``query()`` is cheap and true once it has. On CPU it is always true."""

    def query(self) -> bool:
        """Whether everything before the event has been written."""


class KVExports(Protocol):
    """Prefill side of the exchange (the hold table)."""

    def begin(self, transfer_id: int, num_blocks: int) -> None:
        """The request owns ``num_blocks`` blocks; segments will follow."""

    def announce(
        self,
        transfer_id: int,
        first_block: int,
        block_ids: Sequence[int],
        layer_start: int,
        layer_end: int,
        event: ReadyEvent,
        rank: int,
    ) -> None:
        """Layers ``[layer_start, layer_end)`` of the blocks from index ``first_block`` may be read from ``rank`` after
        ``event``.
        """

    def final(self, transfer_id: int, num_tokens: int, first_tokens: Sequence[FirstToken]) -> None:
        """Everything is announced; the hold waits for Done (or ends, if every choice finished)."""

    def refuse(self, transfer_id: int, reason: str) -> None:
        """The attempt was refused before ``begin``; its Open is answered Gone."""

    def revoke(self, transfer_id: int, reason: str) -> None:
        """After return no confirmation can be given, so the caller may free the blocks. Idempotent."""


class KVImports(Protocol):
    """Decode side of the exchange (the import table)."""

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        """The request owns its blocks; from index ``first_block`` on they are to be read into ``block_ids``.

        An empty list means a full prefix hit: nothing is read, the exchange still confirms the first token.
        """

    def abandon(self, transfer_id: int) -> None:
        """The engine no longer wants the exchange. If it had been told ``reserved``, DestinationSafe follows."""


class RolePolicy(Protocol):
    """What a role admits and what ends a request; everything else is common to both pools."""

    @property
    def name(self) -> str:
        """prefill or decode."""

    def reserve_tokens(self, request: Request) -> int:
        """Tokens that must have blocks when ``request`` is admitted (prefill: the whole prompt)."""

    def holds(self, request: Request) -> bool:
        """Whether the request is HELD for a decode worker once its first token is sampled."""

    def loads(self, request: Request) -> bool:
        """Whether the request's prompt KV comes from a prefill worker."""

    def prompt_budget(self, num_decoding: int, max_num_batched_tokens: int) -> int:
        """Prompt tokens that one step may compute while ``num_decoding`` requests generate."""


class Proposer(Protocol):
    """Speculation: guesses what follows a request's known tokens."""

    def propose(self, request: Request) -> list[int]:
        """Draft tokens after the last known token, best effort, perhaps none. Does not mutate ``request``.

        The scheduler truncates the answer to the token budget, ``max_tokens``, ``max_model_len`` and free blocks.
        """


class Speculation(Proposer, Protocol):
    """A proposer that learns whether its drafts pay: ``begin_step``, proposals, ``end_step``."""

    def begin_step(self, batch_size: int) -> None:
        """Decides whether the coming step drafts; ``batch_size`` counts the requests that generate."""

    def end_step(self, batch_size: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """What a step did that computed no prompt tokens: drafts verified and accepted, and its duration."""


class GrammarError(Exception):
    """A constraint that can go no further, such as one that met a resource limit. Only its request fails."""


class Grammars(Protocol):
    """Structured output: compiled constraints and one matcher per (attempt, choice).

    Life of a matcher: ``compile`` -> GrammarReady -> ``rows`` / ``accept`` each step -> ``release``. A matcher never
    advances except in ``accept``; drafts are looked ahead inside ``rows``. Before ``accept`` ask ``completes``.
    """

    def compile(self, request: Request, post: Callable[[Command], None]) -> None:
        """Starts compiling ``request.constraint`` on another thread, which posts GrammarReady or GrammarFailed.

        When it is ready, the matcher has consumed ``request.output_ids`` (tokens of earlier attempts).
        """

    def fork(self, source: Request, target: Request) -> None:
        """Gives ``target`` (another choice of the same attempt) a matcher in the state of ``source``'s."""

    def rows(self, request: Request, draft_ids: Sequence[int]) -> torch.Tensor:
        """Int32 bitmask ``[1 + len(draft_ids), ceil(vocab / 32)]``, bit 1 = allowed; row i follows i drafts.

        Rows after a draft that the grammar refuses allow everything: verification stops before them.

        Raises:
            GrammarError: the constraint met a resource limit.
        """

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        """Advances over appended tokens. Not called with a token that ends the request.

        Raises:
            GrammarError: the constraint refuses a token.
        """

    def completes(self, request: Request, token_id: int) -> bool:
        """Whether the output satisfies the constraint with ``token_id``, and nothing can follow. Does not advance.

        The request then finishes with STOP.

        Raises:
            GrammarError: the constraint refuses the token.
        """

    def release(self, request: Request) -> None:
        """Forgets the matcher (or the compilation under way) of one choice. Idempotent."""
