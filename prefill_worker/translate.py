"""Proto messages of kv.v1 to exchange messages and back, prefill side."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.engine.commands import FirstToken
from twinpool.kv_transfer.messages import (
    Abandon,
    ConnectorMessage,
    Done,
    Final,
    First,
    FromDecode,
    FromPrefill,
    Gone,
    Open,
    Released,
    Segment,
)
from twinpool.proto import inference_pb2, kv_pb2

_FINISH = {
    "": inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}


def from_decode(request: kv_pb2.SessionRequest) -> FromDecode:
    """What decode said. Raises ValueError for a message that has no place after Hello."""
    match request.WhichOneof("message"):
        case "open":
            return Open(request.open.transfer_id)
        case "done":
            return Done(request.done.transfer_id)
        case "abandon":
            return Abandon(request.abandon.transfer_id)
        case "connector":
            connector = request.connector
            return ConnectorMessage(connector.source_rank, connector.target_rank, connector.payload)
        case other:
            raise ValueError(f"a decode worker sent {other} inside a session; run equal versions")


def to_decode(message: FromPrefill) -> kv_pb2.SessionResponse:
    """The wire form of what prefill says."""
    match message:
        case Segment():
            return kv_pb2.SessionResponse(
                segment=kv_pb2.Segment(
                    transfer_id=message.transfer_id,
                    rank=message.rank,
                    first_block=message.first_block,
                    block_ids=message.block_ids,
                    layer_start=message.layer_start,
                    layer_end=message.layer_end,
                )
            )
        case Final(transfer_id, num_tokens, first_tokens):
            firsts = [_first_to_proto(first) for first in first_tokens]
            final = kv_pb2.Final(transfer_id=transfer_id, num_tokens=num_tokens, first_tokens=firsts)
            return kv_pb2.SessionResponse(final=final)
        case Released(transfer_id, valid):
            return kv_pb2.SessionResponse(released=kv_pb2.Released(transfer_id=transfer_id, valid=valid))
        case Gone(transfer_id, reason):
            return kv_pb2.SessionResponse(gone=kv_pb2.Gone(transfer_id=transfer_id, reason=reason))
        case ConnectorMessage(source, target, payload):
            connector = kv_pb2.ConnectorMessage(source_rank=source, target_rank=target, payload=payload)
            return kv_pb2.SessionResponse(connector=connector)


def _first_to_proto(first: First) -> kv_pb2.FirstToken:
    message = kv_pb2.FirstToken(choice=first.choice, token_id=first.token_id, finish_reason=_FINISH[first.finish])
    if first.logprob is not None:
        logprob, rank, top = first.logprob
        message.logprob.token_id = first.token_id
        message.logprob.logprob = logprob
        message.logprob.rank = rank
        for token_id, value in top:
            message.logprob.top.add(token_id=token_id, logprob=value)
    return message


def firsts(first_tokens: Sequence[FirstToken]) -> list[First]:
    """The exchange's form of what the engine sampled."""
    return [
        First(
            token.choice,
            token.token_id,
            token.finish.value if token.finish is not None else "",
            (token.logprob.logprob, token.logprob.rank, token.logprob.top) if token.logprob is not None else None,
        )
        for token in first_tokens
    ]
