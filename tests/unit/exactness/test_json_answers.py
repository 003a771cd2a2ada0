"""A real model at temperature 1 through both pools: every answer under a JSON schema parses and is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from pair import Ask, Grammars, Pool, pair
from twinpool.config import ModelConfig
from twinpool.engine.ngram import NgramProposer
from twinpool.engine.request import Constraint, FinishReason, SamplingParams, StopParams
from twinpool.engine.speculation import SteadyProposer
from twinpool.model_source import resolve_model
from twinpool.progress import Progress

TEXT = {"type": "string", "minLength": 1, "maxLength": 30}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a city with its name, country and population": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "country": TEXT,
            "population": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
            "capital": {"type": "boolean"},
        },
        "required": ["name", "country", "population"],
        "additionalProperties": False,
    },
    "a shopping list": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "item": TEXT,
                "unit": {"enum": ["kg", "l", "piece", None]},
                "amount": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["item", "unit"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "the weather of three days": {
        "type": "object",
        "properties": {
            "days": {
                "type": "array",
                "items": {
                    "type": "array",
                    "prefixItems": [{"type": "string", "pattern": "^(Mon|Tue|Wed)$"}, {"enum": ["rain", "sun"]}],
                    "minItems": 2,
                    "maxItems": 2,
                    "items": False,
                },
                "minItems": 3,
                "maxItems": 3,
            }
        },
        "required": ["days"],
        "additionalProperties": False,
    },
    "a person with an address, or only an e-mail": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "first name": TEXT,
                    "address": {
                        "type": "object",
                        "properties": {"street": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                        "required": ["street", "zip"],
                        "additionalProperties": False,
                    },
                },
                "required": ["first name", "address"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"e-mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,8}\\.(com|org)$"}},
                "required": ["e-mail"],
                "additionalProperties": False,
            },
        ]
    },
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(ModelConfig(path="demo"), Progress())


@pytest.fixture(scope="module")
def pools(folder: Path) -> Iterator[list[Pool]]:
    made = [Pool.load(folder, 16, 400), Pool.load(folder, 16, 400)]
    yield made
    for item in made:
        item.close()


@pytest.fixture(scope="module")
def constraints(folder: Path, pools: list[Pool]) -> Iterator[dict[str, Grammars]]:
    config = pools[0].built.config
    made = {
        role: Grammars(folder / "tokenizer.json", config.vocab_size, config.eos_ids) for role in ("prefill", "decode")
    }
    yield made
    for item in made.values():
        item.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("count", "speculate"), [(8, True), pytest.param(200, False, marks=pytest.mark.slow, id="two hundred")]
)
def test_every_answer_parses_and_validates(
    folder: Path, pools: list[Pool], constraints: dict[str, Grammars], count: int, speculate: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    speculation = SteadyProposer(NgramProposer(2, 4, 4)) if speculate else None
    with pair(*pools, grammars=constraints, speculation=speculation, max_num_seqs=25) as deployment:
        asked: list[tuple[int, dict[str, Any]]] = []
        for seed in range(count):
            subject, schema = list(SCHEMAS.items())[seed % len(SCHEMAS)]
            turn = f"<|im_start|>user\nDescribe {subject} as JSON.<|im_end|>\n<|im_start|>assistant\n"
            ask = Ask(
                tokenizer.encode(turn, add_special_tokens=False).ids,
                SamplingParams(seed=seed),
                StopParams(800),
                Constraint("json_schema", json.dumps(schema)),
            )
            asked.append((deployment.ask(ask), schema))
        deployment.drain()
        texts = []
        for attempt, schema in asked:
            [answer] = deployment.answers(attempt)
            assert answer.finish is FinishReason.STOP
            texts.append(tokenizer.decode(answer.tokens))
            jsonschema.validate(json.loads(texts[-1]), schema)
            assert deployment.decode_sink.stats[attempt, 0].computed_tokens == 0
        assert len(set(texts)) > count // 2
