"""An engine alone, and a prefill and a decode worker in two processes, on a GPU; also runs on a CPU, slowly."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from gpu_report import Row, guarded

from tiny_models import write_tiny_llama
from twinpool.decode_worker.policy import DecodePolicy
from twinpool.engine.commands import Submit
from twinpool.engine.core import Engine, EngineConfig
from twinpool.engine.executor import BuiltExecutor, build_executor
from twinpool.engine.no_exchange import NoExports, NoImports
from twinpool.engine.ports import OutputSink, StepOutputs
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.engine.sampler import Sampler

ONE_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
"""Llama-3.2-1B's shape."""


class Collect(OutputSink):
    """Tokens by attempt."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def emit(self, outputs: StepOutputs) -> None:
        """See ``OutputSink``."""
        for output in outputs.outputs:
            self.tokens.setdefault(output.attempt_id, []).extend(output.token_ids)


def build(folder: Path, device: torch.device, dtype: str, num_blocks: int) -> BuiltExecutor:
    """A model with KV on ``device``."""
    return build_executor(
        folder,
        dtype=dtype,
        device=device,
        block_size=16,
        num_blocks=num_blocks,
        allocate=lambda size, device: torch.zeros(size, dtype=torch.uint8, device=device),
        make_sampler=Sampler,
    )


def generate(
    built: BuiltExecutor, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[list[int]], float, list[float]]:
    """Greedy tokens of all prompts at once, seconds until each has its first one, seconds of each step after that."""
    config = EngineConfig(
        max_model_len=built.max_model_len, vocab_size=built.config.vocab_size, revision="check", max_num_seqs=256
    )
    sink = Collect()
    engine = Engine(config, built.executor, DecodePolicy(2048), sink, NoExports(), NoImports())
    for number, prompt in enumerate(prompts, 1):
        stop = StopParams(new_tokens, ignore_eos=True)
        engine.post(Submit(Request(number, list(prompt), SamplingParams(temperature=0), stop)))
    began = time.perf_counter()
    prefill, steps = 0.0, []
    while True:
        started = time.perf_counter()
        if not engine.step():
            break
        if prefill:
            steps.append(time.perf_counter() - started)
        elif len(sink.tokens) == len(prompts):
            prefill = time.perf_counter() - began
    return [sink.tokens[number] for number in range(1, len(prompts) + 1)], prefill, steps


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random prompts that share no prefix."""
    generator = torch.Generator().manual_seed(count * length)
    return torch.randint(0, vocab - 10, (count, length), generator=generator).tolist()


@contextlib.contextmanager
def without_graphs(built: BuiltExecutor):
    """Steps run as usual inside."""
    runner = built.executor._rank.runner
    graphs, runner._graphs = runner._graphs, None
    try:
        yield
    finally:
        runner._graphs = graphs


def exactness(device: torch.device, folder: Path) -> list[Row]:
    """Greedy float32 tokens: with graphs, without, and on the CPU."""
    prompts = [prompt for n in range(1, 12) for prompt in prompts_of(1, 5 * n, 290)]
    built = build(folder, device, "float32", 256)
    truth = generate(build(folder, torch.device("cpu"), "float32", 256), prompts, 40)[0]
    with_graphs = generate(built, prompts, 40)[0]
    with without_graphs(built):
        plain = generate(built, prompts, 40)[0]
    case = f"{len(prompts)} prompts, 40 tokens, float32"
    return [
        Row("engine, graphs = CPU reference", case, f"{_equal(with_graphs, truth)} equal", with_graphs == truth),
        Row("engine, no graphs = CPU reference", case, f"{_equal(plain, truth)} equal", plain == truth),
    ]


def _equal(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> str:
    return f"{sum(a == b for a, b in zip(found, wanted, strict=True))} of {len(wanted)}"


def engine_times(
    device: torch.device, folder: Path, rate: float, batches: Sequence[int], length: int = 512
) -> list[Row]:
    """Decode steps and prefill of a model in bf16; ``rate`` is the memory's, in bytes per second."""
    built = build(folder, device, "bfloat16", 64 * max(batches))
    config, layout = built.config, built.layout
    inner = 3 * config.intermediate_size + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    weights = 2 * config.hidden_size * (config.num_layers * inner + config.vocab_size)
    kv_token = 2 * 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    rows = []
    for batch in batches:
        prompts = prompts_of(batch, length, config.vocab_size)
        generate(built, prompts, 8)
        built.executor._rank.runner.synchronize()
        prefill, steps = generate(built, prompts_of(batch + 1, length, config.vocab_size)[:batch], 64)[1:]
        with without_graphs(built):
            plain = generate(built, prompts_of(batch + 2, length, config.vocab_size)[:batch], 64)[2]
        ours, eager = statistics.median(steps) * 1e3, statistics.median(plain) * 1e3
        limit = (weights + batch * (length + 32) * kv_token) / rate * 1e3
        result = f"{ours:.2f} ms; without graphs {eager:.2f}; weights and KV {limit:.2f} ({limit / ours:.0%})"
        figures = {"ms": ours, "eager_ms": eager, "limit_ms": limit, "tokens_per_s": batch / ours * 1e3}
        rows.append(
            Row("decode step", f"batch {batch}, context {length} to {length + 64}", result, ours < eager, figures)
        )
        speed = batch * length / prefill
        rows.append(Row("prefill", f"{batch} × {length}", f"{speed:.0f} tokens/s", None, {"tokens_per_s": speed}))
    return rows


async def _ask(folder: Path, model: Path, settings: dict[str, object], prompts: Sequence[list[int]], new_tokens: int):
    from clusters import Cluster

    cluster = Cluster.of(folder, model, settings=settings)
    try:
        cluster.launch_all()
        await cluster.ready()
        async with cluster.client() as client:
            ask = partial(client.generate, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
            await ask(prompts[0][:-1])
            began = time.perf_counter()
            answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            return answers, time.perf_counter() - began
    finally:
        cluster.stop()


def pools(device: torch.device, folder: Path, connector: str) -> list[Row]:
    """1P1D in two processes beside the engine alone: the same float32 tokens, remote KV, over which transport."""
    prompts = prompts_of(16, 200, 290)
    truth = generate(build(folder, device, "float32", 512), prompts, 32)[0]
    settings: dict[str, object] = {
        "model.device": device.type,
        "model.dtype": "float32",
        "prefill.engine.num_blocks": 512,
        "decode.engine.num_blocks": 512,
        "transport.connector": connector,
    }
    with tempfile.TemporaryDirectory() as place:
        answers, seconds = asyncio.run(_ask(Path(place), folder, settings, prompts, 32))
    found = [list(answer.token_ids) for answer in answers]
    remote = sum(answer.usage.remote_tokens for answer in answers)
    result = f"{_equal(found, truth)} equal; {remote} tokens over {answers[0].usage.transport}; {seconds:.2f} s"
    return [Row(f"1P1D, {connector}", "16 × 200, 32 tokens, float32", result, found == truth and remote > 0)]


def engine(device: torch.device, rate: float) -> list[Row]:
    """The engine alone; models are made on the fly."""
    with tempfile.TemporaryDirectory() as place:
        tiny = write_tiny_llama(Path(place) / "tiny", head_dim=32)
        rows = guarded("engine", partial(exactness, device, tiny))
        large = write_tiny_llama(Path(place) / "large", **ONE_BILLION)
        return rows + guarded("engine", partial(engine_times, device, large, rate, (1, 16, 64)))


def both_pools(device: torch.device) -> list[Row]:
    """Over each connector; one that is not installed or cannot use the device gives a row that says so."""
    with tempfile.TemporaryDirectory() as place:
        tiny = write_tiny_llama(Path(place) / "tiny", head_dim=32)
        connectors = ("nixl", "nccl")
        return [row for name in connectors for row in guarded(f"1P1D, {name}", partial(pools, device, tiny, name))]
