"""A load test's other target: any OpenAI-compatible server, or a vLLM pair of prefill and decode."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp

from twinpool.bench.target import Timeline
from twinpool.bench.workload import Ask

TIMEOUT_S = 600.0


class OpenAITarget:
    """``/v1/completions`` of any server; with ``prefill_url`` a vLLM pair.

    Then each prompt goes to the prefill server first, for one token, and what it answers about the KV goes with the
    request to the decode server: both legs count.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None, prefill_url: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._prefill_url = None if prefill_url is None else f"{prefill_url.rstrip('/')}/v1/completions"
        self._model = model
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def ask(self, ask: Ask) -> Timeline:
        """See ``Target``."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "temperature": 0,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeline = Timeline(len(ask.prompt), time.perf_counter())
        try:
            if self._prefill_url is not None:
                body["kv_transfer_params"] = await self._prefill(self._prefill_url, body)
            await self._stream(body, timeline)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
        timeline.ended = time.perf_counter()
        return timeline

    async def close(self) -> None:
        """See ``Target``."""
        await self._session.close()

    async def _prefill(self, url: str, body: dict[str, Any]) -> Any:
        """The first leg of vLLM's disaggregated prefill."""
        wish = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": wish}
        del leg["stream_options"]
        async with self._session.post(url, json=leg) as response:
            return (await _checked(response).json())["kv_transfer_params"]

    async def _stream(self, body: dict[str, Any], timeline: Timeline) -> None:
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                timeline.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    timeline.error = str(event["error"])[:200]
                if event.get("choices"):
                    timeline.pieces.append(time.perf_counter())
                usage = event.get("usage")
                if usage:
                    timeline.tokens, timeline.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def _checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    response.raise_for_status()
    return response
