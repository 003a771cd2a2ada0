from twinpool.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "open", "done", "abandon", "connector", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    done: Done
    abandon: Abandon
    connector: ConnectorMessage
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., connector: _Optional[_Union[ConnectorMessage, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "segment", "final", "released", "gone", "connector", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    segment: Segment
    final: Final
    released: Released
    gone: Gone
    connector: ConnectorMessage
    heartbeat: Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., connector: _Optional[_Union[ConnectorMessage, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "epoch", "protocol", "revision", "layout", "layout_text", "connector", "ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    protocol: int
    revision: str
    layout: str
    layout_text: str
    connector: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ..., revision: _Optional[str] = ..., layout: _Optional[str] = ..., layout_text: _Optional[str] = ..., connector: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("rank", "layer_start", "layer_end", "head_start", "head_end", "num_blocks", "metadata")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    num_blocks: int
    metadata: bytes
    def __init__(self, rank: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., num_blocks: _Optional[int] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: Hello
    def __init__(self, info: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("transfer_id", "rank", "first_block", "block_ids", "layer_start", "layer_end")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    rank: int
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    layer_start: int
    layer_end: int
    def __init__(self, transfer_id: _Optional[int] = ..., rank: _Optional[int] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("transfer_id", "num_tokens", "first_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    num_tokens: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, transfer_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "finish_reason", "logprob")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    finish_reason: _inference_pb2.FinishReason
    logprob: _inference_pb2.TokenLogprob
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., logprob: _Optional[_Union[_inference_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("transfer_id", "valid")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    valid: bool
    def __init__(self, transfer_id: _Optional[int] = ..., valid: _Optional[bool] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    reason: str
    def __init__(self, transfer_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ConnectorMessage(_message.Message):
    __slots__ = ("source_rank", "target_rank", "payload")
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    source_rank: int
    target_rank: int
    payload: bytes
    def __init__(self, source_rank: _Optional[int] = ..., target_rank: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
