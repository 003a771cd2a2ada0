"""One truth for every way to compute it: options × lengths × cache states × chunking × speculation × pools.

The reference is a monolithic engine that serves each request alone, without prefix cache and chunks; greedy output is
checked against transformers as well. In float32 everything else must say the same tokens, the same end and (closely)
the same log probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from options import BLOCK, EOS, LENGTHS, LONG_LENGTHS, OPTIONS, Truth, asks_of, check, outputs_of, prompt_of, with_stops
from pair import Ask, Grammars, Oracle, Pair, pair
from twinpool.engine.request import StopParams
from twinpool.engine.speculation import SteadyProposer

CACHES = ("cold", "partial", "full")


def test_reference_is_what_transformers_says(truth: Truth, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for length in LENGTHS:
        tokens = prompt_of(length)
        with torch.inference_mode():
            for _ in range(12):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert truth["greedy", length][0].tokens == tokens[length:]


def test_reference_exercises_every_option(truth: Truth) -> None:
    """A matrix over options that do nothing would prove nothing."""
    for length in LENGTHS:
        said = {name: truth[name, length] for name in [*OPTIONS, "stop ids"]}
        assert len({tuple(said[name][0].tokens[:9]) for name in ("greedy", "seeded", "filtered", "penalties")}) >= 3
        assert said["logprobs"][0].tokens == said["greedy"][0].tokens
        assert len(said["logprobs"][0].logprobs) == 12
        assert len(said["logprobs"][0].prompt_logprobs) == length - 1
        assert said["stop ids"][0].stop_token_id == said["stop ids"][0].tokens[-1]
        assert said["min tokens"][0].tokens[-1] == EOS
        assert len(said["min tokens"][0].tokens) == 7
        assert [len(said[name][0].tokens) for name in ("max 1", "max 2")] == [1, 2]
        assert len({tuple(answer.tokens) for answer in said["n"]}) == 3
    for name in ("end token", "json", "regex"):
        assert any(answer.finish is not None for length in LENGTHS for answer in truth[name, length])
    assert any(len(truth["end token", length][0].tokens) < 12 for length in LENGTHS)


def warm(deployment: Pair, asks: Sequence[Ask], state: str, where: str, block: int) -> None:
    """Puts the first half of the prompt's full blocks, or all of them, into one pool's cache."""
    if state == "cold":
        return
    for ask in asks:
        full = len(ask.prompt) // block
        keep = full if state == "full" else full // 2
        if keep:
            deployment.ask(Ask(ask.prompt[: keep * block], salt=ask.salt, stop=StopParams(1, ignore_eos=True)), where)
    deployment.drain()


def cached(length: int, state: str, block: int, limit: int) -> int:
    full = length // block
    return block * min({"cold": 0, "partial": full // 2, "full": full}[state], limit // block)


def run_cell(
    pool: Any,
    grammars: Mapping[str, Grammars],
    truth: Truth,
    length: int,
    caches: tuple[str, str],
    chunk: int,
    speculate: bool,
    names: Sequence[str] | None = None,
    block: int = BLOCK,
) -> None:
    """One cell of the matrix. ``caches`` are the states on prefill ("" without that pool) and on decode."""
    asked = [item for item in with_stops(asks_of(length), truth, length).items() if names is None or item[0] in names]
    asks = [ask for _, ask in asked]
    speculation = SteadyProposer(Oracle(outputs_of(truth))) if speculate else None
    prefill = pool(block, 400, "prefill") if caches[0] else None
    settings = {"grammars": grammars, "speculation": speculation, "chunk": chunk}
    with pair(pool(block, 400, "decode"), prefill, **settings) as deployment:
        if caches[0]:
            warm(deployment, asks, caches[0], "prefill", block)
        warm(deployment, asks, caches[1], "decode", block)
        attempts = [deployment.ask(ask) for ask in asks]
        deployment.drain()
        for (name, _), attempt in zip(asked, attempts, strict=True):
            check(deployment.answers(attempt), truth[name, length], name)
        for (name, ask), attempt in zip(asked, attempts, strict=True):
            if caches[0]:
                check_remote_work(deployment, attempt, ask, length, caches, block)
            elif ask.sampling.prompt_logprobs is None:
                stats = deployment.decode_sink.stats[attempt, 0]
                assert stats.cached_tokens == cached(length, caches[1], block, length - 1), name
                assert stats.cached_tokens + stats.computed_tokens == length
        if speculate and (names is None or "greedy" in names):
            attempt = attempts[[name for name, _ in asked].index("greedy")]
            stats = deployment.decode_sink.stats[attempt, 0]
            assert 0 < stats.accepted_tokens < stats.draft_tokens


def check_remote_work(
    deployment: Pair, attempt: int, ask: Ask, length: int, caches: tuple[str, str], block: int
) -> None:
    """Decode computes no prompt token, and reads only what it lacks; every token is accounted for once."""
    source = deployment.prefill_sink.stats[attempt, 0]
    assert source.cached_tokens + source.computed_tokens == length
    if ask.sampling.prompt_logprobs is None:
        assert source.cached_tokens == cached(length, caches[0], block, length - 1)
    assert len(deployment.prefill_sink.answers[attempt, 0].tokens) == 1
    if (attempt, 0) in deployment.decode_sink.stats:
        stats = deployment.decode_sink.stats[attempt, 0]
        assert stats.computed_tokens == 0
        assert stats.cached_tokens == cached(length, caches[1], block, length)
        assert stats.cached_tokens + stats.remote_tokens == length


CELLS = [
    (length, caches, (512, 3)[index % 2], index % 4 >= 2)
    for index, (length, caches) in enumerate(itertools.product(LENGTHS, itertools.product(CACHES, CACHES)))
]
ALONE = [
    (length, ("", cache), (512, 3)[index % 2], index % 4 >= 2)
    for index, (length, cache) in enumerate(itertools.product(LENGTHS, CACHES))
]


@pytest.mark.parametrize(("length", "caches", "chunk", "speculate"), CELLS + ALONE)
def test_all_options_in_one_batch(
    pool: Any, grammars: Any, truth: Truth, length: int, caches: tuple[str, str], chunk: int, speculate: bool
) -> None:
    """Every length and cache state; chunking and speculation alternate."""
    run_cell(pool, grammars, truth, length, caches, chunk, speculate)


EVERY_CACHE = [*itertools.product(CACHES, CACHES), *(("", cache) for cache in CACHES)]


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("chunk", [512, 1, 3, 5])
@pytest.mark.parametrize("block", [2, 4])
@pytest.mark.parametrize("caches", EVERY_CACHE)
def test_full_product(
    pool: Any, grammars: Any, truth: Truth, caches: tuple[str, str], block: int, chunk: int, speculate: bool
) -> None:
    for length in LENGTHS:
        run_cell(pool, grammars, truth, length, caches, chunk, speculate, None, block)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("chunk", [512, 7, 16])
@pytest.mark.parametrize("caches", EVERY_CACHE)
def test_full_product_at_block_16(
    pool: Any, grammars: Any, long_truth: Truth, caches: tuple[str, str], chunk: int, speculate: bool
) -> None:
    for length in LONG_LENGTHS:
        run_cell(pool, grammars, long_truth, length, caches, chunk, speculate, None, 16)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("caches", EVERY_CACHE)
def test_each_option_alone(
    pool: Any, grammars: Any, truth: Truth, caches: tuple[str, str], chunk: int, speculate: bool
) -> None:
    for length in LENGTHS:
        for name in [*OPTIONS, "stop ids"]:
            run_cell(pool, grammars, truth, length, caches, chunk, speculate, [name])
