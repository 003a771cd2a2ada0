"""Constraints, drafts and bad ids through real processes: what the workers are wired with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from options import SCHEMA
from twinpool.errors import InvalidRequest


async def test_constrained_answers_through_both_pools(tiny_llama: Path, start_cluster: Any) -> None:
    settings = {"model.dtype": "float32", "prefill.engine.num_blocks": 200, "decode.engine.num_blocks": 200}
    async with start_cluster(tiny_llama, settings=settings) as cluster, cluster.client() as client:
        calls = [client.generate(f"Answer {seed}", seed=seed, max_tokens=300, json_schema=SCHEMA) for seed in range(4)]
        for result in await asyncio.gather(*calls):
            jsonschema.validate(json.loads(result.text), json.loads(SCHEMA))
            assert result.finish_reason == "stop"
            assert result.usage.decode_computed_tokens == 0
            assert result.prefill_worker
        repeated = await client.generate("Say it", seed=1, max_tokens=300, regex="(one two ){12}")
        assert repeated.text == "one two " * 12
        assert repeated.usage.accepted_tokens > 0
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", max_tokens=5, regex="(unbalanced")
        assert "structured_output" in caught.value.field
        assert (await client.generate("still here", max_tokens=5, ignore_eos=True)).usage.completion_tokens == 5
        await cluster.all_free()
