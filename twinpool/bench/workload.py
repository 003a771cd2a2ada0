"""What a load test asks: prompts and answer lengths, made up or from a trace.

A trace is CSV (a time, an input and an output length per row; the column names of the Azure traces are known) or JSONL
(``timestamp`` in milliseconds, ``input_length``, ``output_length``, and perhaps ``hash_ids``, as Mooncake writes it:
equal ids stand for equal blocks of 512 tokens, so prefixes repeat as they did).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from twinpool.errors import ConfigError

HASH_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "world", "school", "state", "group", "country")
_COLUMNS = {
    "at": ("TIMESTAMP", "timestamp", "arrival_time"),
    "input": ("ContextTokens", "input_length", "num_prefill_tokens", "input_tokens"),
    "output": ("GeneratedTokens", "output_length", "num_decode_tokens", "output_tokens"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; ``at`` in seconds from the first, None where the trace has no times."""

    at: float | None
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt (token ids or text) and the exact length of its answer."""

    prompt: list[int] | str
    output_tokens: int


class PromptMaker:
    """Makes prompts; a function of the seed. Ids are drawn from ``[0, vocab_size)``."""

    def __init__(self, vocab_size: int, text: bool, seed: int) -> None:
        self._vocab_size = vocab_size
        self._text = text
        self._seed = seed
        self._draw = random.Random(seed)

    def ask(self, row: Row) -> Ask:
        """The request of a row. Without hash ids no two prompts share a prefix."""
        if self._text:  # about a token a word
            return Ask(" ".join(self._draw.choices(_WORDS, k=row.input_tokens)), row.output_tokens)
        ids: list[int] = []
        for hash_id in row.hash_ids:
            block = random.Random(f"{self._seed}:{hash_id}")
            ids += block.choices(range(self._vocab_size), k=HASH_BLOCK)
        ids = ids[: row.input_tokens]
        ids += self._draw.choices(range(self._vocab_size), k=row.input_tokens - len(ids))
        return Ask(ids, row.output_tokens)


def made_up(count: int, input_tokens: int, output_tokens: int, spread: float, seed: int) -> list[Row]:
    """Rows without times; lengths are uniform within ±``spread`` (a share) of the given ones, at least 1."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * draw.uniform(1 - spread, 1 + spread))) if spread else mean

    return [Row(None, length(input_tokens), length(output_tokens)) for _ in range(count)]


def read_trace(path: Path, count: int, most_tokens: int | None, speed: float) -> list[Row]:
    """The first ``count`` rows that are not longer than ``most_tokens`` in all, ``speed`` times as fast.

    Raises:
        ConfigError: the file is missing, or not in one of the two forms.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_take(_jsonl(file) if path.suffix == ".jsonl" else _csv(file), count, most_tokens))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no trace: {error}; it needs a time, an input and an output length") from error
    if not rows:
        raise ConfigError(f"{path} has no request of at most {most_tokens} tokens; raise --max-tokens")
    first = rows[0].at
    if first is None:
        return rows
    return [replace(row, at=((row.at or 0.0) - first) / speed) for row in rows]


def _take(rows: Iterator[Row], count: int, most_tokens: int | None) -> Iterator[Row]:
    for row in rows:
        if count <= 0:
            return
        if most_tokens is None or row.input_tokens + row.output_tokens <= most_tokens:
            count -= 1
            yield row


def _csv(lines: Iterator[str]) -> Iterator[Row]:
    for item in csv.DictReader(lines):
        at = next((item[name] for name in _COLUMNS["at"] if name in item), None)
        yield Row(None if at is None else _seconds(at), _length(item, "input"), _length(item, "output"))


def _jsonl(lines: Iterator[str]) -> Iterator[Row]:
    for line in lines:
        item = json.loads(line)
        hash_ids = tuple(int(hash_id) for hash_id in item.get("hash_ids", ()))
        yield Row(float(item["timestamp"]) / 1e3, _length(item, "input"), _length(item, "output"), hash_ids)


def _length(item: dict[str, str], kind: str) -> int:
    return max(1, int(item[_known(item, _COLUMNS[kind])]))


def _known(item: dict[str, str], names: Sequence[str]) -> str:
    for name in names:
        if name in item:
            return name
    raise KeyError(f"none of the columns {', '.join(names)}")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()
