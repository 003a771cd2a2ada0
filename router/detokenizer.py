"""Token ids to text, piece by piece: never half a character, and the pieces add up to the whole."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one choice.

    The last few prompt tokens give the decoder its context, so that a space which belongs to the first word of the
    answer is neither lost nor doubled.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        context = list(prompt_ids[-_CONTEXT_TOKENS:])
        if tokenizer.decode(context, skip_special_tokens=True).endswith(_REPLACEMENT):
            context = []  # the prompt ends inside a character: its rest must not be printed
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became complete with ``token_id``; may be empty."""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower when invalid bytes change earlier text
            context, replaced = list(self._pending), self.flush()
            if replaced.endswith(_REPLACEMENT):
                context = []
            self._stream = DecodeStream(ids=context, skip_special_tokens=True)
            return replaced
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character are replaced."""
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        return text
