"""A process that serves a patterned KV region, for the connector contract: ``python kv_source.py KIND TLS BYTES SEED``.

It prints its metadata in hex, then makes progress until its standard input closes. TLS "-" leaves UCX its choice.
Meanwhile its standard streams are the sessions with readers: a line "PEER HEX" is a payload to or from a peer, which
joins with its first line.
"""

import contextlib
import functools
import os
import queue
import sys
import threading

import torch

from twinpool.kv_transfer.connectors.choose import make_connector
from twinpool.kv_transfer.connectors.ucx import UcxSettings


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    """Bytes that depend on their whole offset and on the seed, so that a misplaced copy shows."""
    words = torch.arange((num_bytes + 7) // 8, dtype=torch.int64)
    return ((words + 1) * 0x9E3779B97F4A7C1 + seed * 0x632BE59BD9B4E01).view(torch.uint8)[:num_bytes]


def main() -> None:
    kind, tls, num_bytes, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    connector = make_connector(kind, UcxSettings(None if tls == "-" else tls, "lo"))
    connector.allocate(num_bytes, torch.device("cpu")).copy_(pattern(num_bytes, seed))
    sys.stdout.write(connector.metadata().hex() + "\n")
    sys.stdout.flush()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take_lines() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    def send(peer: str, payload: bytes) -> None:
        os.write(1, f"{peer} {payload.hex()}\n".encode())

    threading.Thread(target=take_lines, daemon=True).start()
    peers = set[str]()
    while True:
        connector.progress()
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=0.0005 if connector.pumped else 0.02)
            if not line:
                break
            peer, payload = line.split()
            if peer not in peers:
                peers.add(peer)
                connector.accept(peer, functools.partial(send, peer))
            connector.deliver(peer, bytes.fromhex(payload))
    connector.close()


if __name__ == "__main__":
    main()
