"""Names of full KV blocks: a hash chain over (parent, tokens), started by a salt. Equal in every process.

A block's KV depends on all tokens before it, so its name includes its parent's. The chain starts from what else
changes KV: model revision, adapter and the request's cache salt. SHA-256, cut to 16 bytes, because a forged
collision would show one client another's KV; about 1 us per block of 16 tokens.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
NAME_BYTES = 8
"""Of a hash, what cache events and routers go by: enough to find a prefix, never used to share KV."""
_DOMAIN = b"twinpool.block.v1"


def chain_root(revision: str, adapter: str, cache_salt: str) -> bytes:
    """Parent of a first block, ``HASH_BYTES`` long. Fields are length-prefixed, so no two triples collide."""
    digest = hashlib.sha256(_DOMAIN)
    for text in (revision, adapter, cache_salt):
        data = text.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()[:HASH_BYTES]


def chain_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids``, in order; ``parent`` names what comes before.

    Tokens are hashed as little-endian uint32. A partial last block is ignored.

    Raises:
        OverflowError: a token id does not fit in 32 bits.
    """
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    stride = 4 * block_size
    hashes: list[bytes] = []
    for start in range(0, len(data) - stride + 1, stride):
        parent = hashlib.sha256(parent + data[start : start + stride]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes


def short_name(block_hash: bytes) -> int:
    """The name of a block in cache events: its hash's first ``NAME_BYTES``, little-endian."""
    return int.from_bytes(block_hash[:NAME_BYTES], "little")
