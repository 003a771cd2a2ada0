from twinpool.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_INVALID: _ClassVar[FailureCode]
    FAILURE_CODE_EXHAUSTED: _ClassVar[FailureCode]
    FAILURE_CODE_KV_LOST: _ClassVar[FailureCode]
    FAILURE_CODE_DRAINING: _ClassVar[FailureCode]
    FAILURE_CODE_DEADLINE: _ClassVar[FailureCode]
    FAILURE_CODE_INTERNAL: _ClassVar[FailureCode]
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_INVALID: FailureCode
FAILURE_CODE_EXHAUSTED: FailureCode
FAILURE_CODE_KV_LOST: FailureCode
FAILURE_CODE_DRAINING: FailureCode
FAILURE_CODE_DEADLINE: FailureCode
FAILURE_CODE_INTERNAL: FailureCode

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "peers", "piece", "heartbeat", "order")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    peers: Peers
    piece: TokenPiece
    heartbeat: Heartbeat
    order: Order
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., piece: _Optional[_Union[TokenPiece, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "report", "step", "failed", "loaded", "cache", "obeyed")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    OBEYED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    report: Report
    step: StepOutput
    failed: Failed
    loaded: Loaded
    cache: CacheEvents
    obeyed: Obeyed
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., obeyed: _Optional[_Union[Obeyed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "epoch", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    epoch: int
    protocol: int
    def __init__(self, router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "epoch", "protocol", "role", "model", "revision", "layout", "layout_text", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "kv_address", "connector", "vocab_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    protocol: int
    role: str
    model: str
    revision: str
    layout: str
    layout_text: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    kv_address: str
    connector: str
    vocab_size: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., layout: _Optional[str] = ..., layout_text: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_address: _Optional[str] = ..., connector: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class TokenPiece(_message.Message):
    __slots__ = ("attempt_id", "prompt_ids")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt_id: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt_id", "request_id", "prompt_ids", "output_ids", "sampling", "stopping", "structured_output", "logprobs", "prompt_logprobs", "priority", "cache_salt", "deadline_s", "transfer_id", "prefill_worker", "prefill_epoch", "first_choice")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    stopping: _inference_pb2.Stopping
    structured_output: _inference_pb2.StructuredOutput
    logprobs: int
    prompt_logprobs: int
    priority: int
    cache_salt: str
    deadline_s: float
    transfer_id: int
    prefill_worker: str
    prefill_epoch: int
    first_choice: int
    def __init__(self, attempt_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_inference_pb2.Stopping, _Mapping]] = ..., structured_output: _Optional[_Union[_inference_pb2.StructuredOutput, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., deadline_s: _Optional[float] = ..., transfer_id: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., prefill_epoch: _Optional[int] = ..., first_choice: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    def __init__(self, attempt_id: _Optional[int] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "epoch", "kv_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    kv_address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., kv_address: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Order(_message.Message):
    __slots__ = ("order_id", "drain", "flush_cache", "log_level")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    drain: Drain
    flush_cache: FlushCache
    log_level: str
    def __init__(self, order_id: _Optional[int] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ..., log_level: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("enabled", "hand_over_s")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_S_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    hand_over_s: float
    def __init__(self, enabled: _Optional[bool] = ..., hand_over_s: _Optional[float] = ...) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Obeyed(_message.Message):
    __slots__ = ("order_id", "error")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    error: str
    def __init__(self, order_id: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("steps", "running", "waiting", "loading", "held", "free_blocks", "queued_tokens", "open_exchanges", "quarantined_blocks", "draining", "links", "totals")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    running: int
    waiting: int
    loading: int
    held: int
    free_blocks: int
    queued_tokens: int
    open_exchanges: int
    quarantined_blocks: int
    draining: bool
    links: _containers.RepeatedCompositeFieldContainer[Linked]
    totals: Totals
    def __init__(self, steps: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., loading: _Optional[int] = ..., held: _Optional[int] = ..., free_blocks: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., open_exchanges: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., draining: _Optional[bool] = ..., links: _Optional[_Iterable[_Union[Linked, _Mapping]]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("transfers", "transfers_lost", "transfer_bytes", "transfer_s", "exposed_transfer_s", "holds_released", "holds_revoked", "preemptions", "batches", "batch_requests", "batch_tokens", "batch_s")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_LOST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    HOLDS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    HOLDS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_S_FIELD_NUMBER: _ClassVar[int]
    transfers: int
    transfers_lost: int
    transfer_bytes: int
    transfer_s: float
    exposed_transfer_s: float
    holds_released: int
    holds_revoked: int
    preemptions: int
    batches: int
    batch_requests: int
    batch_tokens: int
    batch_s: float
    def __init__(self, transfers: _Optional[int] = ..., transfers_lost: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., holds_released: _Optional[int] = ..., holds_revoked: _Optional[int] = ..., preemptions: _Optional[int] = ..., batches: _Optional[int] = ..., batch_requests: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., batch_s: _Optional[float] = ...) -> None: ...

class Linked(_message.Message):
    __slots__ = ("worker_id", "epoch", "linked", "transport", "gigabytes_per_second", "error")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GIGABYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    linked: bool
    transport: str
    gigabytes_per_second: float
    error: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., linked: _Optional[bool] = ..., transport: _Optional[str] = ..., gigabytes_per_second: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "outputs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[AttemptOutput]
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[AttemptOutput, _Mapping]]] = ...) -> None: ...

class AttemptOutput(_message.Message):
    __slots__ = ("attempt_id", "choice", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "prompt_logprobs", "stats")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    choice: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    finish_reason: _inference_pb2.FinishReason
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    stats: AttemptStats
    def __init__(self, attempt_id: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ..., stats: _Optional[_Union[AttemptStats, _Mapping]] = ...) -> None: ...

class AttemptStats(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "remote_tokens", "queue_s", "prefill_s", "transfer_s", "exposed_transfer_s", "transfer_bytes", "transport", "draft_tokens", "accepted_tokens", "preemptions", "read_s", "sample_s", "confirm_s", "schedule_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    remote_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    exposed_transfer_s: float
    transfer_bytes: int
    transport: str
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    read_s: float
    sample_s: float
    confirm_s: float
    schedule_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., read_s: _Optional[float] = ..., sample_s: _Optional[float] = ..., confirm_s: _Optional[float] = ..., schedule_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("attempt_id", "code", "message", "field")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    code: FailureCode
    message: str
    field: str
    def __init__(self, attempt_id: _Optional[int] = ..., code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    def __init__(self, attempt_id: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("reset", "stored", "removed")
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reset: _Optional[bool] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...
