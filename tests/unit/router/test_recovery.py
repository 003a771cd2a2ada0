"""Losses: whatever happens to an attempt, the text continues exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from twinpool.errors import InvalidRequest, Overloaded, TwinpoolError, Unavailable
from twinpool.grpc_errors import error_from_rpc
from twinpool.proto import inference_pb2 as pb
from twinpool.proto import worker_pb2

SAID = "the quick brown fox jumps"


async def collect(cluster: Any, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**{"text": "a prompt"} | fields)
    async with asyncio.timeout(15):
        return [message async for message in cluster.stub.Generate(request)]


async def failing(cluster: Any, **fields: Any) -> TwinpoolError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(cluster, **fields)
    return error_from_rpc(caught.value)


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(message.text for message in messages if message.index == index)


async def test_decode_dies_in_the_middle(make_cluster: Any, byte_ids: Any) -> None:
    def setup(cluster: Any) -> None:
        for worker in cluster.workers:
            worker.pause_after = 6

    async with make_cluster(SAID, prefills=1, decodes=2, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        victim, other = cluster.workers[1], cluster.workers[2]
        await victim.paused.wait()
        other.pause_after = None
        await victim.kill()
        messages = await task
        assert text_of(messages) == SAID
        assert messages[-1].usage.redispatches == 1
        assert messages[-1].decode_worker == "decode-1"
        again = other.submits[0]
        assert list(again.prompt_ids) == byte_ids("a prompt")
        assert list(again.output_ids) == byte_ids(SAID)[: len(again.output_ids)]
        assert len(again.output_ids) >= 1
        assert again.attempt_id != victim.submits[0].attempt_id
        assert again.sampling.seed == victim.submits[0].sampling.seed
        assert again.stopping.max_tokens == victim.submits[0].stopping.max_tokens


async def test_choices_continue_one_by_one(make_cluster: Any, byte_ids: Any, eos: int) -> None:
    said = ["aaaaaaaaaa", "bb", "cccccccccccc"]

    def script(choice: int) -> list[int]:
        return [*byte_ids(said[choice]), eos]

    def setup(cluster: Any) -> None:
        for worker in cluster.workers:
            worker.pause_after = 5

    async with make_cluster(script, decodes=2, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        task = asyncio.create_task(collect(cluster, sampling=pb.Sampling(n=3)))
        victim, other = cluster.workers[1], cluster.workers[2]
        await victim.paused.wait()
        other.pause_after = None
        await victim.kill()
        messages = await task
        assert [text_of(messages, index) for index in range(3)] == said
        assert sorted(submit.first_choice for submit in other.submits) == [0, 2]
        assert {submit.sampling.n for submit in other.submits} == {1}
        for submit in other.submits:
            assert list(submit.output_ids) == byte_ids(said[submit.first_choice])[: len(submit.output_ids)]


async def test_silent_worker_is_dead(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        for worker in cluster.workers:
            worker.pause_after = 3

    async with make_cluster(SAID, decodes=2, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        task = asyncio.create_task(collect(cluster))
        victim, other = cluster.workers[1], cluster.workers[2]
        await victim.paused.wait()
        other.pause_after = None
        victim.silent = True
        assert text_of(await task) == SAID


async def test_prefill_death_after_loaded_changes_nothing(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 4

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        await cluster.workers[1].paused.wait()
        await cluster.workers[0].kill()
        await cluster.until(lambda: len(cluster.router.registry.views()) == 1)
        cluster.workers[1].go.set()
        messages = await task
        assert text_of(messages) == SAID
        assert messages[-1].usage.redispatches == 0
        assert len(cluster.workers[1].submits) == 1


async def test_prefill_death_before_loaded_starts_anew(make_cluster: Any) -> None:
    """Token 0 was delivered; the only prefill worker is gone, so decode recomputes and says so."""

    def setup(cluster: Any) -> None:
        cluster.workers[1].delay_first = asyncio.Event()

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        call = cluster.stub.Generate(pb.GenerateRequest(text="a prompt"))
        first = await call.read()
        await cluster.workers[0].kill()
        await cluster.until(lambda: len(cluster.router.registry.views()) == 1)
        cluster.workers[1].delay_first.set()
        messages = [first]
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert text_of(messages) == SAID
        assert messages[-1].usage.redispatches == 1
        assert "decode recomputes" in messages[-1].usage.route_reason
        assert len(cluster.workers[1].submits[-1].output_ids) == 1
        assert cluster.workers[1].cancels == [cluster.workers[1].submits[0].attempt_id]


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize(
    "code", [worker_pb2.FAILURE_CODE_KV_LOST, worker_pb2.FAILURE_CODE_DRAINING, worker_pb2.FAILURE_CODE_INTERNAL]
)
async def test_failed_attempts_are_repeated(make_cluster: Any, role: int, code: int) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[role].fail = [(code, "no")] * 2
        cluster.workers[1 - role].delay_first = asyncio.Event()

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        await cluster.eventually(lambda: len(cluster.workers[role].submits) >= 3)
        cluster.workers[1 - role].delay_first.set()
        messages = await task
        assert text_of(messages) == SAID
        assert messages[-1].usage.redispatches == 2


async def test_third_crash_is_poison(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].fail = [(worker_pb2.FAILURE_CODE_INTERNAL, "boom")] * 9

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        error = await failing(cluster)
        assert "3 workers failed" in error.message
        assert "boom" in error.message
        assert len(cluster.workers[1].submits) == 3
        await cluster.idle()


async def test_attempts_are_bounded(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].fail = [(worker_pb2.FAILURE_CODE_KV_LOST, "gone")] * 99

    async with make_cluster(SAID, setup=setup, max_attempts=4) as cluster:
        await cluster.router.wait_ready()
        error = await failing(cluster)
        assert isinstance(error, Unavailable)
        assert len(cluster.workers[1].submits) == 4


async def test_exhausted_tries_the_others_then_says_so(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        for worker in cluster.workers[1:]:
            worker.fail = [(worker_pb2.FAILURE_CODE_EXHAUSTED, "full")]
            worker.confirm = False
        cluster.workers[0].delay_first = asyncio.Event()

    async with make_cluster(SAID, decodes=2, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        error = await failing(cluster)
        assert isinstance(error, Overloaded)
        assert [len(worker.submits) for worker in cluster.workers[1:]] == [1, 1]
        cluster.workers[0].delay_first.set()
        assert text_of(await collect(cluster)) == SAID


async def test_exhausted_on_one_uses_the_other(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].fail = [(worker_pb2.FAILURE_CODE_EXHAUSTED, "full")]

    async with make_cluster(SAID, decodes=2, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        messages = await collect(cluster)
        assert text_of(messages) == SAID
        assert messages[-1].decode_worker == "decode-1"


async def test_invalid_is_not_repeated(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[0].fail = [(worker_pb2.FAILURE_CODE_INVALID, "bad schema")]
        cluster.workers[1].delay_first = asyncio.Event()

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        error = await failing(cluster)
        assert isinstance(error, InvalidRequest)
        await cluster.eventually(lambda: bool(cluster.workers[1].cancels))
        assert len(cluster.workers[0].submits) == 1


async def test_restart_at_the_same_address(make_cluster: Any) -> None:
    async with make_cluster(SAID) as cluster:
        await cluster.router.wait_ready()
        for worker in cluster.workers:
            old = worker.epoch
            await worker.kill()
            await cluster.until(lambda: len(cluster.router.registry.views()) == 1)
            await worker.restart()
            assert worker.epoch != old
            await cluster.until(lambda: not cluster.router.registry.not_ready_reason)
            messages = await collect(cluster)
            assert text_of(messages) == SAID
            assert cluster.workers[1].submits[-1].prefill_epoch == cluster.workers[0].epoch


async def test_a_request_survives_until_its_only_worker_is_back(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 3

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        decode = cluster.workers[1]
        await decode.paused.wait()
        await decode.kill()
        await cluster.until(lambda: len(cluster.router.registry.views()) == 1)
        decode.pause_after = None
        await decode.restart()
        assert text_of(await task) == SAID


@pytest.mark.parametrize(
    ("change", "values"),
    [("revision", ("rev", "other")), ("layout", ("layout", "other"))],
)
async def test_unequal_workers_are_never_paired(make_cluster: Any, change: str, values: tuple[str, str]) -> None:
    def setup(cluster: Any) -> None:
        setattr(cluster.workers[1], change, "other")

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 2)
        error = await failing(cluster)
        assert isinstance(error, Unavailable)
        status = await cluster.info.GetStatus(pb.GetStatusRequest())
        assert not status.ready
        link = next(worker for worker in status.workers if worker.role == "decode").links[0]
        assert not link.linked
        assert all(value in link.error for value in values)
        assert cluster.workers[1].peer_sets == [[]]


async def test_other_protocol_is_refused_with_both_values(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].protocol = 99

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.until(lambda: any(s.state == "refused" for s in cluster.router.registry.sessions))
        status = await cluster.info.GetStatus(pb.GetStatusRequest())
        refused = next(worker for worker in status.workers if worker.state == "refused")
        assert "99" in refused.error
        assert "1" in refused.error


async def test_peers_follow_the_pool(make_cluster: Any) -> None:
    async with make_cluster(SAID, prefills=2) as cluster:
        decode = cluster.workers[2]
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)
        await cluster.eventually(lambda: decode.peer_sets[-1:] == [["prefill-0", "prefill-1"]])
        await cluster.workers[0].kill()
        await cluster.eventually(lambda: decode.peer_sets[-1:] == [["prefill-1"]])


async def test_drain_lets_requests_finish(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 3

    async with make_cluster(SAID, setup=setup) as cluster:
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        await cluster.workers[1].paused.wait()
        stopping = asyncio.create_task(cluster.router.stop(5))
        await cluster.eventually(lambda: bool(cluster.router.admission.draining))
        assert isinstance(await failing(cluster), Unavailable)
        cluster.workers[1].go.set()
        assert text_of(await task) == SAID
        assert await stopping


@pytest.mark.parametrize("kept", [True, False])
async def test_an_answer_stays_with_the_revision_that_began_it(make_cluster: Any, kept: bool) -> None:
    """decode-0 is of the old revision and dies; the others are of the new one, or decode-1 is old too."""

    def setup(cluster: Any) -> None:
        _, new_prefill, old, heir, new = cluster.workers
        new_prefill.revision = new.revision = "new"
        heir.revision = "rev" if kept else "new"
        old.pause_after = 6
        heir.draining = new.draining = new_prefill.draining = True  # until the stream has begun on the old pair

    async with make_cluster(SAID, prefills=2, decodes=3, setup=setup) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 5)
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        _, new_prefill, old, heir, new = cluster.workers
        await old.paused.wait()
        heir.draining = new.draining = new_prefill.draining = False
        views = cluster.router.registry.views
        await cluster.until(lambda: not any(view.report.draining for view in views()))
        await old.kill()
        if kept:
            messages = await task
            assert (text_of(messages), messages[-1].decode_worker) == (SAID, "decode-1")
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="began this answer") as caught:
                await task
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not new.submits
        fresh = await collect(cluster)  # what nobody has begun goes anywhere
        assert text_of(fresh) == SAID
