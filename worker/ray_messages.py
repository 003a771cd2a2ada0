"""What rank 0 and its placer (``ray_placer``) say to each other, as JSON on a channel of their own.

To the placer: ``Place`` first, ``Stop`` later. From it: ``Placed`` once, or ``Failed``; ``Ended`` for each rank that
has ended, in any order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from twinpool.config import Config


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> bytes:
        """The JSON form."""
        return self.model_dump_json().encode()


class Place(_Message):
    """Place ranks 1 and up, which find rank 0 at ``host``:``port``; each brings its ``tokens`` (see ``rank_dial``)."""

    kind: Literal["place"] = "place"
    config: Config
    role: Literal["prefill", "decode"]
    use_gpu: bool
    host: str
    port: int
    tokens: dict[int, str]


class Stop(_Message):
    """Kill rank ``rank``."""

    kind: Literal["stop"] = "stop"
    rank: int


class Placed(_Message):
    """All ranks have their room; ``gpus`` is the CUDA_VISIBLE_DEVICES of rank 0, None if nothing was reserved."""

    kind: Literal["placed"] = "placed"
    gpus: str | None


class Failed(_Message):
    """There is no room, or no Ray: cause and remedy."""

    kind: Literal["failed"] = "failed"
    message: str


class Ended(_Message):
    """A rank has ended, or Ray does not know about it any more."""

    kind: Literal["ended"] = "ended"
    rank: int
    how: str


FromPlacer = Placed | Failed | Ended
FROM_PLACER: TypeAdapter[FromPlacer] = TypeAdapter(Annotated[FromPlacer, Field(discriminator="kind")])
ToPlacer = Place | Stop
TO_PLACER: TypeAdapter[ToPlacer] = TypeAdapter(Annotated[ToPlacer, Field(discriminator="kind")])
