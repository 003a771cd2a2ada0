"""A new revision of the model is rolled through both pools under load, and back: nobody's request fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from load import prompt, stream

from clusters import Cluster
from twinpool import AsyncClient

STREAMS = 5
"""Of the eight that both decode workers run at once: about 60 %."""
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = (10, 30, 60, 120, 200)
SETTINGS: dict[str, object] = {
    "model.name": "tiny",
    "model.dtype": "float32",
    "decode.engine.max_num_seqs": 4,
    "decode.engine.num_blocks": 300,
    "prefill.engine.num_blocks": 300,
    "prefill.drain_timeout_s": 30,
    "decode.drain_timeout_s": 30,
    "session.report_interval_s": 0.1,
}


@dataclass
class Answers:
    """Tokens by number of the question, with the count of each; ``fresh`` counts since the last ``renew``."""

    seen: list[Counter[tuple[int, ...]]] = field(default_factory=lambda: [Counter() for _ in LENGTHS])
    fresh: Counter[int] = field(default_factory=Counter)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def renew(self) -> None:
        """Waits until each question has been answered twice: the second began after this call."""
        self.fresh.clear()
        while any(self.fresh[number] < 2 for number in range(len(LENGTHS))):
            self.news.clear()
            await self.news.wait()


async def ask_all(client: AsyncClient) -> list[tuple[int, ...]]:
    """The undisturbed answers."""
    asked = (client.generate(prompt(n, 20 + 30 * n), max_tokens=length, **OPTIONS) for n, length in enumerate(LENGTHS))
    return [tuple(answer.token_ids) for answer in await asyncio.gather(*asked)]


@contextlib.asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[Answers]:
    """Streams without end for the time of the block; the first failure is raised at its end."""
    answers, stopping = Answers(), asyncio.Event()

    async def repeat(number: int) -> None:
        while not stopping.is_set():
            answer = await stream(client, prompt(number, 20 + 30 * number), max_tokens=LENGTHS[number], **OPTIONS)
            answers.seen[number][tuple(answer.token_ids)] += 1
            answers.fresh[number] += 1
            answers.news.set()

    tasks = [asyncio.create_task(repeat(number)) for number in range(STREAMS)]
    user = asyncio.current_task()
    assert user is not None
    for task in tasks:
        task.add_done_callback(lambda done: user.cancel() if not done.cancelled() and done.exception() else None)
    try:
        yield answers
        stopping.set()
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            if task.done():
                task.result()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def roll(cluster: Cluster, model: Path, steps: Sequence[Sequence[str]]) -> None:
    """Ends the workers of each step together, starts them with ``model``, and waits until they are linked."""
    for names in steps:
        codes = await asyncio.gather(*(asyncio.to_thread(cluster.terminate, name, 90) for name in names))
        assert codes == [0] * len(names)
        await cluster.until(lambda status, gone=names: not alive(status) & set(gone), 30)  # type: ignore[misc]
        for name in names:
            cluster.overrides[name] = {"model.path": str(model)}
            cluster.launch(name)
        same = {name for name in cluster.nodes if cluster.overrides.get(name, {}).get("model.path") == str(model)}
        await cluster.until(lambda status, same=same: linked(status, same), 120)  # type: ignore[misc]


def alive(status: Any) -> set[str]:
    """The connected workers."""
    return {worker.worker_id for worker in status.workers if worker.state == "alive"}


def linked(status: Any, same: set[str]) -> bool:
    """Whether all workers are alive, those of ``same`` linked with each other, and nobody of it with anybody else."""
    for worker in status.workers:
        if worker.state != "alive":
            return False
        if worker.role == "decode":
            pairs = {link.prefill_worker for link in worker.links if link.linked}
            mine = {name for name in same if name.startswith("prefill")}
            assert not pairs & mine if worker.worker_id not in same else pairs <= mine
            if worker.worker_id in same and pairs != mine:
                return False
    return True


PAIRS = (("prefill-0", "decode-0"), ("prefill-1", "decode-1"))


@pytest.mark.parametrize(
    ("mode", "back"), [("always", False), pytest.param("auto", True, marks=pytest.mark.slow)], ids=["forth", "and back"]
)
async def test_a_revision_rolls_through_both_pools(
    make_tiny_llama: Any, tmp_path: Path, start_cluster: Any, mode: str, back: bool
) -> None:
    old, new = make_tiny_llama(tmp_path / "old"), make_tiny_llama(tmp_path / "new", seed=1)
    settings = {**SETTINGS, "router.disaggregate": mode}
    async with start_cluster(old, 2, 2, settings=settings) as cluster, cluster.client(timeout=120) as client:
        wanted = [await ask_all(client)]
        async with load(client) as answers:
            await roll(cluster, new, PAIRS)
            await answers.renew()
            if back:  # in the other order, and one worker at a time: decode computes what has no prefill worker
                await roll(cluster, old, [[name] for pair in PAIRS[::-1] for name in pair[::-1]])
                await answers.renew()
        wanted.append(await ask_all(client))
        if back:
            assert wanted[1] == wanted[0]
            await roll(cluster, new, PAIRS)
            wanted[1] = await ask_all(client)
        for number, seen in enumerate(answers.seen):
            assert wanted[0][number] != wanted[1][number]
            assert set(seen) == {wanted[0][number], wanted[1][number]}, f"question {number} had other answers"
        await cluster.all_free()
        models = await client.models()
        assert len({model.revision for model in models}) == 1
