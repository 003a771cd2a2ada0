"""The OpenAI-compatible surface over a real deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx


async def test_chat_and_completions_stream_and_whole(tiny_llama: Path, start_cluster: Any) -> None:
    async with (
        start_cluster(tiny_llama) as cluster,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.http_port}", timeout=60) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        assert whole["usage"]["completion_tokens"] == 6
        assert whole["choices"][0]["finish_reason"] == "length"

        text, usage = "", None
        stream_body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/chat/completions", json=stream_body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
        assert text == whole["choices"][0]["message"]["content"]
        assert usage is not None
        assert usage["completion_tokens"] == 6

        ids = {"model": model, "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        completion = (await http.post("/v1/completions", json=ids)).json()
        assert completion["usage"]["prompt_tokens"] == 3

        too_long = await http.post("/v1/completions", json=ids | {"prompt": [1] * 5000})
        assert too_long.status_code == 400
        assert "5000" in too_long.json()["error"]["message"]
        unknown = await http.post("/v1/completions", json=ids | {"model": "no-such-model"})
        assert unknown.status_code == 404
        await cluster.all_free()
