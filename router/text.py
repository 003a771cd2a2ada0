"""Everything the router knows about the model: its tokenizer, its chat template and its end tokens.

Read once, at start, from the model folder (``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``,
``generation_config.json``, ``config.json``); weights are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from twinpool.errors import ConfigError
from twinpool.router.chat_template import ChatTemplate, Conversation, missing_template

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelText:
    """Text in and out of token ids, for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        eos_ids: frozenset[int] = frozenset(),
        bos_token: str = "",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._template = template
        self._bos_token = bos_token
        self._bos_id: int | None = tokenizer.token_to_id(bos_token) if bos_token else None
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """In characters: n tokens stand for at most n times as many."""
        self._byte_of = _byte_alphabet() if _is_byte_level(tokenizer) else None

    @classmethod
    def load(cls, folder: Path) -> ModelText:
        """Reads a Hugging Face model folder.

        Raises:
            ConfigError: a file is missing or unreadable.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; the model folder needs a fast tokenizer (tokenizer.json)")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        special = {key: _token_text(settings[key]) for key in _SPECIAL_TOKEN_KEYS if settings.get(key) is not None}
        source = _template_source(folder, settings)
        return cls(
            tokenizer=tokenizer,
            template=ChatTemplate(source, special) if source else None,
            eos_ids=_eos_ids(folder, tokenizer, special.get("eos_token", "")),
            bos_token=special.get("bos_token", ""),
        )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds, but never two bos."""
        ids = self._encode(text, add_special_tokens=True)
        if self._bos_id is not None and ids[:2] == [self._bos_id] * 2 and text.startswith(self._bos_token):
            del ids[0]
        return ids

    @property
    def template_source(self) -> str:
        """The chat template; empty if there is none."""
        return "" if self._template is None else self._template.source

    def encode_messages(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation; the template writes all special tokens itself.

        Raises:
            Unsupported: the model has no chat template.
            InvalidRequest: the template refuses the messages.
        """
        if self._template is None:
            raise missing_template()
        return self._encode(self._template.render(conversation), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch calls of tokenizers give up the interpreter's lock; with ``encode`` a long prompt would stop
        # the event loop even from another thread, and with it the signs of life that keep the workers' sessions.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name; half a character becomes a replacement character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if self._byte_of is not None:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    return frozenset() if token_id is None else frozenset([token_id])


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template") or ""
    if isinstance(source, list):
        named = {item["name"]: item["template"] for item in source}
        source = named.get("default", "")
    return str(source)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
