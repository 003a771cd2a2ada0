"""A scripted worker (real gRPC on loopback, deterministic tokens) and a router in front of such workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twinpool.config import Config
from twinpool.proto import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from twinpool.router.app import Router
from twinpool.rpc import PROTOCOL_VERSION, Outbox, RpcServer, Servicer, channel

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.token_to_id("<|im_end|>")
VOCAB = 300


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return folder


@dataclass
class FakeWorker:
    """Answers with ``script``: the token at each output index of each choice; what it does beside is set by fields."""

    role: str
    worker_id: str
    script: Callable[[int], list[int]]
    peers: list[FakeWorker] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    epoch: int = field(default_factory=lambda: secrets.randbits(64))
    revision: str = "rev"
    layout: str = "layout"
    protocol: int = PROTOCOL_VERSION
    model: str = "tiny"
    max_model_len: int = 512
    num_blocks: int = 64
    fail: list[tuple[int, str]] = field(default_factory=list)
    """(code, message) for the next attempts, taken from the front."""
    pause_after: int | None = None
    """Stops after this many output tokens until ``go`` is set."""
    silent: bool = False
    confirm: bool = True
    delay_first: asyncio.Event | None = None
    batch: int = 1
    go: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[worker_pb2.Submit] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    peer_sets: list[list[str]] = field(default_factory=list)
    sessions: int = 0
    draining: bool = False
    running: int = 0
    totals: worker_pb2.Totals = field(default_factory=worker_pb2.Totals)
    deaf: bool = False
    """Takes orders, and never says that they were carried out."""
    orders: list[worker_pb2.Order] = field(default_factory=list)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    outbox: Any = None
    _server: RpcServer | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _calls: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        worker = self

        class Service(worker_pb2_grpc.WorkerServiceServicer):
            async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
                async for response in worker._session(requests):
                    yield response

        add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        servicer = Servicer("twinpool.worker.v1.WorkerService", lambda server: add(Service(), server))
        self._server = await RpcServer.start(self.host, self.port, [servicer])
        self.port = self._server.port

    async def kill(self) -> None:
        """Ends at once, as a killed process would."""
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def restart(self) -> None:
        self.epoch = secrets.randbits(64)
        await self.start()

    def info(self) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            protocol=self.protocol,
            role=self.role,
            model=self.model,
            revision=self.revision,
            layout=self.layout,
            layout_text=self.layout,
            block_size=16,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=8,
            kv_address=f"kv-{self.worker_id}" if self.role == "prefill" else "",
            vocab_size=VOCAB,
        )

    async def _session(self, requests: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
        self.sessions += 1
        self.outbox = outbox = Outbox[worker_pb2.SessionResponse]()
        tasks = [asyncio.create_task(self._read(requests, outbox))]
        self._tasks.update(tasks)
        try:
            async for message in outbox:
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def _report(self, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        while True:
            if not self.silent:
                links = [
                    worker_pb2.Linked(worker_id=peer.worker_id, epoch=peer.epoch, linked=True, transport="fake/loop")
                    for peer in self.peers
                ]
                report = self._load(links)
                outbox.put(worker_pb2.SessionResponse(report=report))
            await asyncio.sleep(0.02)

    def _load(self, links: list[worker_pb2.Linked]) -> worker_pb2.Report:
        return worker_pb2.Report(
            free_blocks=self.num_blocks, links=links, draining=self.draining, running=self.running, totals=self.totals
        )

    def _obey(self, order: worker_pb2.Order, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        self.orders.append(order)
        if self.deaf:
            return
        if order.WhichOneof("order") == "drain":
            self.draining = order.drain.enabled
            links = [worker_pb2.Linked(worker_id=peer.worker_id, epoch=peer.epoch, linked=True) for peer in self.peers]
            outbox.put(worker_pb2.SessionResponse(report=self._load(links)))
        outbox.put(worker_pb2.SessionResponse(obeyed=worker_pb2.Obeyed(order_id=order.order_id)))

    async def _read(self, requests: Any, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        pieces: dict[int, list[int]] = {}
        attempts: dict[int, asyncio.Task[None]] = {}
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "hello":
                outbox.put_control(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(info=self.info())))
                self._tasks.add(asyncio.create_task(self._report(outbox)))
            elif kind == "piece":
                pieces.setdefault(request.piece.attempt_id, []).extend(request.piece.prompt_ids)
            elif kind == "peers":
                self.peer_sets.append([peer.worker_id for peer in request.peers.peers])
            elif kind == "order":
                self._obey(request.order, outbox)
            elif kind == "cancel":
                self.cancels.append(request.cancel.attempt_id)
                task = attempts.pop(request.cancel.attempt_id, None)
                if task is not None:
                    task.cancel()
            elif kind == "submit":
                submit = request.submit
                prompt = pieces.pop(submit.attempt_id, []) + list(submit.prompt_ids)
                del submit.prompt_ids[:]
                submit.prompt_ids.extend(prompt)
                self.submits.append(submit)
                task = asyncio.create_task(self._attempt(submit, outbox))
                attempts[submit.attempt_id] = task
                self._tasks.add(task)

    async def _attempt(self, submit: worker_pb2.Submit, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        if self.fail:
            code, message = self.fail.pop(0)
            failed = worker_pb2.Failed(attempt_id=submit.attempt_id, code=code, message=message)
            outbox.put(worker_pb2.SessionResponse(failed=failed))
            return
        if self.delay_first is not None:
            await self.delay_first.wait()
        start = len(submit.output_ids)
        choices = range(submit.first_choice, submit.first_choice + submit.sampling.n)
        if self.role == "decode" and self.confirm:
            outbox.put(worker_pb2.SessionResponse(loaded=worker_pb2.Loaded(attempt_id=submit.attempt_id)))
        live = list(choices)
        index = start
        while live:
            if self.pause_after is not None and self.role == "decode" and index - start >= self.pause_after:
                self.paused.set()
                await self.go.wait()
            step = worker_pb2.StepOutput()
            for choice in list(live):
                tokens = self._said(submit, choice, index, 1 if self.role == "prefill" else self.batch)
                output = self._output(submit, choice, index, tokens)
                if output.finish_reason or self.role == "prefill":
                    live.remove(choice)
                step.outputs.append(output)
            outbox.put(worker_pb2.SessionResponse(step=step))
            index += self.batch
            await asyncio.sleep(0)

    def _said(self, submit: worker_pb2.Submit, choice: int, start: int, count: int) -> list[int]:
        """The script; behind its end, which only a request that ignores it sees, there is more of something."""
        said = self.script(choice)[start : start + count]
        return said + ids("z") * (count - len(said)) if submit.stopping.ignore_eos else said

    def _output(self, submit: worker_pb2.Submit, choice: int, index: int, tokens: list[int]) -> Any:
        tokens = tokens[: submit.stopping.max_tokens - index]
        output = worker_pb2.AttemptOutput(attempt_id=submit.attempt_id, choice=choice, index=index, token_ids=tokens)
        if submit.HasField("logprobs"):
            for token in tokens:
                top = [inference_pb2.TopLogprob(token_id=token, logprob=-0.5)][: submit.logprobs]
                output.logprobs.append(inference_pb2.TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=top))
        first = index == len(submit.output_ids)
        computes = self.role == "prefill" or not submit.transfer_id
        if submit.HasField("prompt_logprobs") and first and computes and choice == submit.first_choice:
            output.prompt_logprobs.extend(
                inference_pb2.TokenLogprob(token_id=token, logprob=-1.0, rank=1) for token in submit.prompt_ids[1:]
            )
        if first:
            n = len(submit.prompt_ids)
            remote = n if self.role == "decode" and submit.transfer_id else 0
            output.stats.CopyFrom(
                worker_pb2.AttemptStats(
                    computed_tokens=n - remote,
                    remote_tokens=remote,
                    prefill_s=0.01,
                    transport="fake/loop" if remote else "",
                    transfer_bytes=remote * 100,
                )
            )
        ends = {EOS, *submit.stopping.stop_token_ids} - ({EOS} if submit.stopping.ignore_eos else set())
        if tokens and tokens[-1] in ends:
            output.finish_reason = inference_pb2.FINISH_REASON_STOP
            output.stop_token_id = tokens[-1]
        elif index + len(tokens) >= submit.stopping.max_tokens:
            output.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        return output


class Cluster:
    """Scripted workers and a router; ``stub`` is a gRPC client of it, ``http_url`` its HTTP API."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.router: Router = None  # type: ignore[assignment]
        self.channel: grpc.aio.Channel = None  # type: ignore[assignment]

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def info(self) -> Any:
        return inference_pb2_grpc.InfoServiceStub(self.channel)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.router.registry.wait_changed()

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """For what happens inside a scripted worker, which has no events to wait for."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            await self.router.admission._idle.wait()


def script_of(text: str) -> Callable[[int], list[int]]:
    """All choices say ``text`` and end."""
    return lambda choice: [*ids(text), EOS]


@pytest.fixture
def make_cluster(model_folder: Path) -> Any:
    """``async with make_cluster("text", prefills=1, decodes=1, **router settings) as cluster``."""
    return cluster_maker(model_folder)


@pytest.fixture
def make_cluster_of() -> Any:
    """``make_cluster_of(model folder)`` gives a ``make_cluster`` of that model."""
    return cluster_maker


def cluster_maker(model_folder: Path) -> Any:
    @contextlib.asynccontextmanager
    async def make(
        script: str | Callable[[int], list[int]] = "hello world",
        prefills: int = 1,
        decodes: int = 1,
        setup: Callable[[Cluster], None] | None = None,
        sections: dict[str, Any] | None = None,
        **router: Any,
    ) -> AsyncIterator[Cluster]:
        cluster = Cluster()
        say = script_of(script) if isinstance(script, str) else script
        pool = [FakeWorker("prefill", f"prefill-{i}", say) for i in range(prefills)]
        cluster.workers = pool + [FakeWorker("decode", f"decode-{i}", say, peers=pool) for i in range(decodes)]
        if setup is not None:
            setup(cluster)
        for worker in cluster.workers:
            await worker.start()
        settings = {"grpc_port": 0, "http_port": 0, "disaggregate": "always", "drain_timeout_s": 0} | router
        settings["workers"] = [worker.address for worker in cluster.workers]
        session = {"report_interval_s": 0.05, "suspect_after_s": 0.3, "dead_after_s": 0.6}
        cluster.router = await Router.start(
            Config.model_validate({"router": settings, "session": session} | (sections or {})), model_folder
        )
        cluster.channel = channel(f"127.0.0.1:{cluster.router.grpc_port}")
        try:
            yield cluster
        finally:
            await cluster.channel.close()
            await cluster.router.stop(0)
            for worker in cluster.workers:
                await worker.kill()

    return make


@pytest.fixture
def byte_ids() -> Callable[[str], list[int]]:
    return ids


@pytest.fixture
def eos() -> int:
    return EOS


@pytest.fixture
def tokenizer() -> Tokenizer:
    return TOKENIZER
