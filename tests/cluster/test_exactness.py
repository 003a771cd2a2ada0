"""Greedy output in float32 is the same from transformers, one engine alone, and the two pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_models import FAMILIES
from twinpool import AsyncClient
from twinpool.config import ModelConfig
from twinpool.model_source import resolve_model
from twinpool.progress import Progress
from twinpool.results import Completion

BLOCK = 16
NEW_TOKENS = 8


def reference(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers generates greedily in float32, without end tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
            )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


async def answers(client: AsyncClient, prompts: list[list[int]], new_tokens: int, at_once: int) -> list[Completion]:
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> Completion:
        async with gate:
            return await client.generate(prompt, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

    return await asyncio.gather(*map(one, prompts))


def check(results: list[Completion], expected: list[list[int]], remote: bool) -> None:
    for result, tokens in zip(results, expected, strict=True):
        assert list(result.token_ids) == tokens
        usage = result.usage
        assert usage.completion_tokens == len(tokens)
        if remote:
            assert usage.decode_computed_tokens == 0
            assert usage.remote_tokens + usage.decode_cached_tokens == usage.prompt_tokens
            assert usage.prefill_cached_tokens + usage.prefill_computed_tokens == usage.prompt_tokens
            assert result.prefill_worker
        else:
            assert usage.remote_tokens == 0
            assert usage.decode_computed_tokens + usage.decode_cached_tokens == usage.prompt_tokens
            assert not result.prefill_worker


def tiny_prompts() -> list[list[int]]:
    """Unshared prompts of every length up to three blocks and one."""
    return [[(7 * n + 3 * i) % 250 + 1 for i in range(n)] for n in range(1, 3 * BLOCK + 2)]


TRANSPORTS = {"nixl": "nixl/", "nccl": "nccl/gloo", "local": "local/shm"}


@pytest.mark.parametrize(
    ("connector", "chunk"), [("nixl", 512), ("nixl", 7), ("nccl", 7), ("local", 512), ("local", 7)]
)
async def test_tiny_llama_through_both_pools(tiny_llama: Path, start_cluster: Any, connector: str, chunk: int) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl")
    prompts = tiny_prompts()
    expected = await asyncio.to_thread(reference, tiny_llama, prompts, NEW_TOKENS)
    settings = {
        "model.dtype": "float32",
        "transport.connector": connector,
        "prefill.engine.prefill_chunk": chunk,
        "prefill.engine.num_blocks": 200,
        "decode.engine.num_blocks": 200,
    }
    async with start_cluster(tiny_llama, settings=settings) as cluster, cluster.client() as client:
        alone = await answers(client, prompts, NEW_TOKENS, at_once=1)
        check(alone, expected, remote=True)
        assert all(result.usage.transport.startswith(TRANSPORTS[connector]) for result in alone[:BLOCK])
        check(await answers(client, prompts, NEW_TOKENS, at_once=16), expected, remote=True)
        await cluster.all_free()


@pytest.mark.parametrize("chunk", [512, 7])
async def test_tiny_llama_on_decode_alone(tiny_llama: Path, start_cluster: Any, chunk: int) -> None:
    prompts = tiny_prompts()
    expected = await asyncio.to_thread(reference, tiny_llama, prompts, NEW_TOKENS)
    settings = {
        "model.dtype": "float32",
        "router.disaggregate": "never",
        "decode.engine.prefill_chunk": chunk,
        "decode.engine.num_blocks": 200,
    }
    async with start_cluster(tiny_llama, prefill=0, settings=settings) as cluster, cluster.client() as client:
        check(await answers(client, prompts, NEW_TOKENS, at_once=1), expected, remote=False)
        check(await answers(client, prompts, NEW_TOKENS, at_once=16), expected, remote=False)
        await cluster.all_free()


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("gemma3", "mixtral") else pytest.mark.slow) for family in FAMILIES],
)
async def test_every_family_through_both_pools(
    family: str, make_tiny_model: Any, start_cluster: Any, tmp_path: Path
) -> None:
    folder = await asyncio.to_thread(make_tiny_model, family, tmp_path / "model")
    prompts = tiny_prompts()[::3]
    expected = await asyncio.to_thread(reference, folder, prompts, NEW_TOKENS)
    settings = {
        "model.dtype": "float32",
        "prefill.engine.prefill_chunk": 20,
        "prefill.engine.num_blocks": 200,
        "decode.engine.num_blocks": 200,
    }
    async with start_cluster(folder, settings=settings) as cluster, cluster.client() as client:
        check(await answers(client, prompts, NEW_TOKENS, at_once=1), expected, remote=True)
        check(await answers(client, prompts, NEW_TOKENS, at_once=16), expected, remote=True)
        await cluster.all_free()


QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours of the rainbow.",
    "How many legs does a spider have? Explain.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue? 🌍",
    "Schreibe einen Satz über Köln.",
    "def fibonacci(n):",
)
EXCERPT_CHARACTERS = (120, 300, 500, 800, 1200, 1700, 2300, 3000, 3800, 4700, 5600, 7500)


def real_prompts(folder: Path) -> list[list[int]]:
    """Twenty chat prompts of 10 to 1,500 tokens: questions, and excerpts of the licence with a task."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    tasks = [f"Summarise this text:\n{licence[400 : 400 + size]}" for size in EXCERPT_CHARACTERS]
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in (*QUESTIONS, *tasks)]
    return [tokenizer.encode(turn, add_special_tokens=False).ids for turn in turns]


@pytest.fixture(scope="module")
def expect() -> Callable[[Path, list[list[int]]], list[list[int]]]:
    """``reference`` of real prompts, which computes each of them once: transformers takes seconds for the long ones."""
    known: dict[tuple[int, ...], list[int]] = {}

    def get(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
        new = [prompt for prompt in prompts if tuple(prompt) not in known]
        known.update(zip(map(tuple, new), reference(folder, new, NEW_TOKENS) if new else [], strict=True))
        return [known[tuple(prompt)] for prompt in prompts]

    return get


@pytest.mark.model
@pytest.mark.parametrize(
    ("loads", "taken"),
    [
        pytest.param(((2048, 1), (200, 16)), slice(0, 16, 3), id="some"),
        pytest.param(((2048, 1), (200, 16)), slice(20), id="each-once", marks=pytest.mark.slow),
        pytest.param(((2048, 16), (200, 1)), slice(20), id="the-other-pairs", marks=pytest.mark.slow),
    ],
)
async def test_real_prompts_on_the_demo_model(
    start_cluster: Any,
    expect: Callable[[Path, list[list[int]]], list[list[int]]],
    loads: tuple[tuple[int, int], ...],
    taken: slice,
) -> None:
    """``loads``: (prefill chunk, requests at once); whole prompts and chunks, alone and sixteen at once."""
    folder = await asyncio.to_thread(resolve_model, ModelConfig(path="demo"), Progress())
    prompts = real_prompts(folder)
    assert len(prompts) == 20
    assert min(map(len, prompts)) >= 10
    assert 1_300 <= max(map(len, prompts)) <= 1_500
    prompts = prompts[taken]
    expected = await asyncio.to_thread(expect, folder, prompts)
    settings: dict[str, object] = {"model.dtype": "float32"}
    for pool in ("prefill", "decode"):
        settings[f"{pool}.engine.prefix_caching"] = False
    for chunk, at_once in loads:
        settings["prefill.engine.prefill_chunk"] = chunk
        async with start_cluster(folder, settings=settings) as cluster, cluster.client() as client:
            check(await answers(client, prompts, NEW_TOKENS, at_once), expected, remote=True)
            await cluster.all_free()
    async with (
        start_cluster(folder, prefill=0, settings=settings | {"router.disaggregate": "never"}) as cluster,
        cluster.client() as client,
    ):
        check(await answers(client, prompts, NEW_TOKENS, at_once), expected, remote=False)
        await cluster.all_free()
