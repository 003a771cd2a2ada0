"""Structured output with a small byte-level BPE tokenizer; the model's vocabulary is padded beyond it."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from twinpool.engine.commands import Command, GrammarFailed, GrammarReady
from twinpool.engine.grammar import LLGuidanceGrammars
from twinpool.engine.ports import GrammarError, Grammars
from twinpool.engine.request import Constraint, Request, SamplingParams, StopParams

from .helpers import make_request, make_sampler, schedule

EOS, PAD = 0, 1
MODEL_VOCAB = 333
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["é😀", "b", None]}, "maxItems": 3},
    },
    "required": ["city", "size", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(['{"city": "Paris", "size": 12, "tags": []}', "abc ab abab"] * 9, trainer)
    assert 258 < tokenizer.get_vocab_size() < MODEL_VOCAB
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer_json(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def grammars(tokenizer_json: Path) -> Iterator[LLGuidanceGrammars]:
    grammars = LLGuidanceGrammars(tokenizer_json, MODEL_VOCAB, frozenset({EOS}))
    yield grammars
    grammars.close()


def constrained(kind: str, source: str, output: Sequence[int] = (), seed: int = 0) -> Request:
    request = make_request(SamplingParams(seed=seed), output=output, stop=StopParams(1000))
    request.constraint = Constraint(kind, source)
    return request


def outcome(grammars: Grammars, request: Request) -> Command:
    posted: queue.Queue[Command] = queue.Queue()
    grammars.compile(request, posted.put)
    return posted.get(timeout=30)


def ready(grammars: Grammars, request: Request) -> Request:
    assert outcome(grammars, request) == GrammarReady(request.attempt_id)
    return request


def allowed(mask: Tensor) -> list[set[int]]:
    assert mask.dtype == torch.int32
    assert mask.shape[-1] == (MODEL_VOCAB + 31) // 32
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=-1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_end_is_allowed_only_where_the_output_is_complete(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    request = ready(grammars, constrained("regex", "ab(c|cd)?"))
    a, b, c, d = (tokenizer.token_to_id(x) for x in "abcd")
    for token, complete, ended in [(a, False, False), (b, True, False), (c, True, False), (d, True, True)]:
        assert token in allowed(grammars.rows(request, []))[0]
        assert grammars.completes(request, token) == ended
        grammars.accept(request, [token])
        assert (EOS in allowed(grammars.rows(request, []))[0]) == complete
    assert allowed(grammars.rows(request, [])) == [{EOS}]


def test_padding_and_special_tokens_are_never_allowed(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    request = ready(grammars, constrained("regex", "(?s:.*)"))
    [tokens] = allowed(grammars.rows(request, []))
    assert EOS in tokens
    assert PAD not in tokens
    assert max(tokens) < tokenizer.get_vocab_size() < MODEL_VOCAB
    assert len(tokens) > 100


def test_drafts_are_looked_ahead_and_rolled_back(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    request = ready(grammars, constrained("regex", "a*b{2}"))
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    plain = grammars.rows(request, [])
    everything = set(range(plain.shape[-1] * 32))
    rows = allowed(grammars.rows(request, [a, b, b]))
    assert rows[0] == allowed(plain)[0]
    assert a in rows[1]
    assert a not in rows[2]
    assert rows[3] == {EOS}
    rows = allowed(grammars.rows(request, [b, a, b]))  # the second draft is refused
    assert b in rows[1]
    assert a not in rows[1]
    assert rows[2:] == [everything] * 2
    assert allowed(grammars.rows(request, [b, b, EOS, a]))[2:] == [{EOS}, everything, everything]
    assert allowed(grammars.rows(request, [b, b, a]))[2:] == [{EOS}, everything]
    assert torch.equal(grammars.rows(request, []), plain)
    with pytest.raises(GrammarError, match="does not follow"):
        grammars.completes(request, EOS)
    assert not grammars.completes(request, b)
    assert torch.equal(grammars.rows(request, []), plain)
    grammars.accept(request, [b])
    plain = grammars.rows(request, [])
    assert grammars.completes(request, b)
    assert torch.equal(grammars.rows(request, []), plain)


def test_prior_output_advances_the_matcher(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    text = '{"city": "Paris", "size'
    first = ready(grammars, constrained("json_schema", json.dumps(SCHEMA)))
    ids = tokenizer.encode(text).ids
    grammars.accept(first, ids)
    moved = constrained("json_schema", json.dumps(SCHEMA), output=ids)
    moved.attempt_id = 8
    ready(grammars, moved)
    assert torch.equal(grammars.rows(first, []), grammars.rows(moved, []))
    wrong = constrained("json_schema", json.dumps(SCHEMA), output=[*ids, tokenizer.token_to_id("x")])
    wrong.attempt_id = 9
    result = outcome(grammars, wrong)
    assert isinstance(result, GrammarFailed)
    assert f"at {len(ids)} does not follow the constraint" in result.message


def test_fork_and_release(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    source = ready(grammars, constrained("regex", "(ab|ba)"))
    target = constrained("regex", "(ab|ba)")
    target.choice = 1
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    grammars.fork(source, target)
    grammars.accept(source, [a])
    grammars.accept(target, [b])
    assert b in allowed(grammars.rows(source, []))[0]
    assert a in allowed(grammars.rows(target, []))[0]
    grammars.release(source)
    grammars.release(source)
    assert len(grammars) == 1
    with pytest.raises(GrammarError, match="no compiled constraint"):
        grammars.rows(source, [])
    grammars.release(target)
    assert len(grammars) == 0


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{bad", "json_schema: "),
        ("json_schema", '{"type": "bogus"}', "bogus"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ("json_schema", '{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
        ("regex", "((", "unclosed group"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "this is not a grammar", "grammar: "),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 1]', "list of at least one string"),
        ("choice", "yes", "choice: "),
        ("yaml", "a: b", "unknown kind"),
    ],
)
def test_a_bad_constraint_fails_alone(grammars: LLGuidanceGrammars, kind: str, source: str, message: str) -> None:
    good = constrained("regex", "ok")
    good.attempt_id = 100
    ready(grammars, good)
    result = outcome(grammars, constrained(kind, source))
    assert isinstance(result, GrammarFailed)
    assert result.attempt_id == 7
    assert message in result.message
    assert "\n" not in result.message
    assert grammars.rows(good, []).shape == (1, 11)


def test_a_resource_limit_fails_one_request(tokenizer_json: Path, tokenizer: Tokenizer) -> None:
    grammars = LLGuidanceGrammars(tokenizer_json, MODEL_VOCAB, frozenset({EOS}), max_lexer_states=50)
    request = ready(grammars, constrained("regex", "(a|b)*a(a|b){300}"))
    rng = random.Random(1)
    with pytest.raises(GrammarError, match="too many states"):  # noqa: PT012 - the step at which it fails is not ours
        for _ in range(200):
            grammars.rows(request, [])
            grammars.accept(request, [tokenizer.token_to_id(rng.choice("ab"))])
    with pytest.raises(GrammarError):
        grammars.completes(request, tokenizer.token_to_id("a"))
    other = constrained("regex", "ok")
    other.attempt_id = 8
    ready(grammars, other)
    grammars.close()


def test_released_compilations_post_nothing(grammars: LLGuidanceGrammars) -> None:
    posted: queue.Queue[Command] = queue.Queue()
    tokenizer = grammars._tokenizer.result(timeout=30)
    grammars._tokenizer = Future()  # holds back what runs; the rest waits in line
    for attempt in range(20):
        request = constrained("regex", "a")
        request.attempt_id = attempt
        grammars.compile(request, posted.put)
        grammars.release(request)
    grammars._tokenizer.set_result(tokenizer)
    grammars.close()
    assert len(grammars) == 0
    assert posted.qsize() == 0


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    grammars = LLGuidanceGrammars(tmp_path / "absent.json", MODEL_VOCAB, frozenset({EOS}))
    result = outcome(grammars, constrained("regex", "a"))
    assert isinstance(result, GrammarFailed)
    assert "absent.json" in result.message
    grammars.close()


def generate(grammars: LLGuidanceGrammars, tokenizer: Tokenizer, request: Request, num_drafts: int = 0) -> str:
    """Samples from noise under the constraint until it ends; drafts come from the (text, noise) of a plain run."""
    sampler = make_sampler(MODEL_VOCAB, stop_ids=(EOS,))
    rng = random.Random(request.sampling.seed)
    ready(grammars, request)
    while True:
        request.draft_ids = [rng.choice(sorted(allowed(grammars.rows(request, []))[0]))] if num_drafts else []
        request.draft_ids += rng.choices(range(MODEL_VOCAB), k=num_drafts - 1) if num_drafts else []
        noise = [
            torch.randn(MODEL_VOCAB, generator=torch.Generator().manual_seed(len(request.output_ids) + j))
            for j in range(1 + len(request.draft_ids))
        ]
        mask = grammars.rows(request, request.draft_ids)
        [sampled] = sampler.sample(torch.stack(noise), [schedule(request)], [mask])
        for token in sampled.token_ids:
            request.output_ids.append(token)
            if token == EOS or grammars.completes(request, token):
                grammars.release(request)
                return str(tokenizer.decode(request.output_ids, skip_special_tokens=True))
            grammars.accept(request, [token])
        assert len(request.output_ids) < 600


@pytest.mark.parametrize("seed", range(15))
def test_every_output_satisfies_its_schema_with_and_without_drafts(
    grammars: LLGuidanceGrammars, tokenizer: Tokenizer, seed: int
) -> None:
    text = generate(grammars, tokenizer, constrained("json_schema", json.dumps(SCHEMA), seed=seed))
    jsonschema.validate(json.loads(text), SCHEMA)
    assert generate(grammars, tokenizer, constrained("json_schema", json.dumps(SCHEMA), seed=seed), 3) == text


def test_choice_grammar_and_regex_outputs(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    choices = ["é😀", 'q"x\\', "a\nb", "yes", "yes, sir", "\0\x7f/", "(a|b)*"]
    seen = {generate(grammars, tokenizer, constrained("choice", json.dumps(choices), seed=s)) for s in range(40)}
    assert seen <= set(choices)
    assert len(seen) > 2
    lark = 'start: sum\nsum: NUM ("+" NUM){1,2}\nNUM: /[0-9]{1,3}/'
    for seed in range(5):
        text = generate(grammars, tokenizer, constrained("grammar", lark, seed=seed))
        assert 2 <= len([int(n) for n in text.split("+")]) <= 3


def test_masked_sampling_is_the_renormalised_restriction(grammars: LLGuidanceGrammars, tokenizer: Tokenizer) -> None:
    request = ready(grammars, constrained("regex", "[a-f]"))
    logits = torch.randn(1, MODEL_VOCAB, generator=torch.Generator().manual_seed(1))
    [sampled] = make_sampler(MODEL_VOCAB, (EOS,)).sample(
        logits, [schedule(request, 20_000)], [grammars.rows(request, [])]
    )
    ids = [tokenizer.token_to_id(c) for c in "abcdef"]
    counts = np.array([sampled.token_ids.count(i) for i in ids])
    expected = torch.softmax(logits[0, ids].double(), -1).numpy() * 20_000
    assert counts.sum() == 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 25  # 5 degrees of freedom: p < 1e-4


def test_transformers_and_compilers_are_not_imported() -> None:
    code = "import sys, twinpool.engine.grammar; print('imported', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "llguidance" in output.split()
    assert not {"transformers", "llguidance.torch"} & set(output.split())
