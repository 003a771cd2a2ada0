"""NIXL as its own documentation uses it, for comparison in measurements: one agent, one read, a tight loop until done.

The agent lives as long as the reader. The source is a ``NixlConnector`` that must make progress meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import nixl._api as nixl_api
import torch

from twinpool.kv_transfer.connectors.base import ConnectorError
from twinpool.kv_transfer.connectors.nixl import source_address
from twinpool.kv_transfer.copy_table import CopyTable


class RawReader:
    """Reads into ``region`` from the source that published ``metadata``; both in host memory."""

    def __init__(self, region: torch.Tensor, metadata: bytes) -> None:
        config = nixl_api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_api.nixl_agent(f"raw-{time.monotonic_ns():x}", config)
        self._base = region.data_ptr()
        self._agent.register_memory([(self._base, region.numel(), 0, "")], "DRAM")
        self._source, agent_metadata = source_address(metadata)
        self._remote = self._agent.add_remote_agent(agent_metadata)

    def read(self, table: CopyTable) -> float:
        """Seconds from the post of one read of all of ``table`` to its end; making the request is not counted.

        Raises ConnectorError if it fails.
        """
        ours = [(self._base + item.target, item.length, 0) for item in table]
        theirs = [(self._source + item.source, item.length, 0) for item in table]
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(ours, "DRAM"),
            self._agent.get_xfer_descs(theirs, "DRAM"),
            self._remote,
            b"",
        )
        began = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectorError(f"the raw read ended as {state}")
        return seconds
