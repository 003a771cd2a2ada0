"""Proto messages of kv.v1 to exchange messages and back, decode side."""

from __future__ import annotations

from twinpool.engine.commands import FirstToken
from twinpool.engine.request import FinishReason, TokenLogprob
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
    inference_pb2.FINISH_REASON_UNSPECIFIED: "",
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


def to_prefill(message: FromDecode) -> kv_pb2.SessionRequest:
    """The wire form of what decode says."""
    match message:
        case Open(transfer_id):
            return kv_pb2.SessionRequest(open=kv_pb2.Open(transfer_id=transfer_id))
        case Done(transfer_id):
            return kv_pb2.SessionRequest(done=kv_pb2.Done(transfer_id=transfer_id))
        case Abandon(transfer_id):
            return kv_pb2.SessionRequest(abandon=kv_pb2.Abandon(transfer_id=transfer_id))
        case ConnectorMessage(source, target, payload):
            connector = kv_pb2.ConnectorMessage(source_rank=source, target_rank=target, payload=payload)
            return kv_pb2.SessionRequest(connector=connector)


def from_prefill(response: kv_pb2.SessionResponse) -> FromPrefill:
    """What prefill said. Raises ValueError for a message that has no place after Welcome."""
    match response.WhichOneof("message"):
        case "segment":
            segment = response.segment
            return Segment(
                segment.transfer_id,
                segment.rank,
                segment.first_block,
                tuple(segment.block_ids),
                segment.layer_start,
                segment.layer_end,
            )
        case "final":
            final = response.final
            return Final(final.transfer_id, final.num_tokens, tuple(_first(first) for first in final.first_tokens))
        case "released":
            return Released(response.released.transfer_id, response.released.valid)
        case "gone":
            return Gone(response.gone.transfer_id, response.gone.reason)
        case "connector":
            connector = response.connector
            return ConnectorMessage(connector.source_rank, connector.target_rank, connector.payload)
        case other:
            raise ValueError(f"a prefill worker sent {other} inside a session; run equal versions")


def _first(first: kv_pb2.FirstToken) -> First:
    logprob = None
    if first.HasField("logprob"):
        top = tuple((item.token_id, item.logprob) for item in first.logprob.top)
        logprob = (first.logprob.logprob, first.logprob.rank, top)
    if first.finish_reason not in _FINISH:
        raise ValueError(f"a prefill worker ended a choice with {first.finish_reason}; run equal versions")
    return First(first.choice, first.token_id, _FINISH[first.finish_reason], logprob)


def first_token(first: First) -> FirstToken:
    """The engine's form of a first token."""
    logprob = None
    if first.logprob is not None:
        logprob = TokenLogprob(first.token_id, *first.logprob)
    return FirstToken(first.choice, first.token_id, FinishReason(first.finish) if first.finish else None, logprob)
