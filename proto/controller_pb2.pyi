from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas", "max")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    max: bool
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., max: _Optional[bool] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("action", "worker_id", "seconds", "replicas", "error")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[ScaleResponse.Action]
        ACTION_ADDED: _ClassVar[ScaleResponse.Action]
        ACTION_REMOVED: _ClassVar[ScaleResponse.Action]
        ACTION_FAILED: _ClassVar[ScaleResponse.Action]
    ACTION_UNSPECIFIED: ScaleResponse.Action
    ACTION_ADDED: ScaleResponse.Action
    ACTION_REMOVED: ScaleResponse.Action
    ACTION_FAILED: ScaleResponse.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    action: ScaleResponse.Action
    worker_id: str
    seconds: float
    replicas: int
    error: str
    def __init__(self, action: _Optional[_Union[ScaleResponse.Action, str]] = ..., worker_id: _Optional[str] = ..., seconds: _Optional[float] = ..., replicas: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
