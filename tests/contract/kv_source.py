"""A process that serves a patterned KV region, for the connector contract: ``python kv_source.py KIND TLS BYTES SEED``.

It prints its metadata in hex, then makes progress until its standard input closes. TLS "-" leaves UCX its choice.
"""

import sys
import threading
import time

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
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        connector.progress()
        time.sleep(0.0005 if connector.pumped else 0.02)
    connector.close()


if __name__ == "__main__":
    main()
