"""Which connector a worker uses."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

import torch.distributed

from twinpool.kv_transfer.connectors.base import Connector, ConnectorError
from twinpool.kv_transfer.connectors.ucx import UcxSettings

log = logging.getLogger(__name__)

ConnectorKind = Literal["auto", "nixl", "nccl", "local"]


def nixl_installed() -> bool:
    """Whether the nixl package can be found (it is not imported)."""
    return importlib.util.find_spec("nixl") is not None


def gloo_built() -> bool:
    """Whether this torch has what the nccl connector needs."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def make_connector(kind: ConnectorKind, ucx: UcxSettings, host: str = "127.0.0.1") -> Connector:
    """Makes the connector of this rank; ``auto`` takes nixl where it is installed, else nccl; its ``name`` tells.

    ``host`` is the address that peers reach this machine at, for connectors that listen by themselves.

    Raises ConnectorError with a remedy when the asked one cannot work here.
    """
    if kind == "auto":
        kind = "nixl" if nixl_installed() else "nccl"
        if kind == "nccl":
            log.info(
                "nixl is not installed: KV travels through torch.distributed (NCCL between GPUs, gloo over TCP "
                "otherwise); pip install 'twinpool[nixl]' for RDMA and shared memory"
            )
    if kind == "nixl":
        if not nixl_installed():
            raise ConnectorError("transport.connector is nixl, but nixl is not installed: pip install 'twinpool[nixl]'")
        # Before nixl is imported, too: it configures its logging then.
        ucx.apply()
        from twinpool.kv_transfer.connectors.nixl import NixlConnector

        return NixlConnector(ucx)
    if kind == "nccl":
        if not gloo_built():
            raise ConnectorError(
                "this torch is built without torch.distributed's gloo: pip install 'twinpool[nixl]' or another torch, "
                "or set transport.connector to local (both workers on one host)"
            )
        from twinpool.kv_transfer.connectors.nccl import NcclConnector

        return NcclConnector(host)
    from twinpool.kv_transfer.connectors.local import LocalConnector

    return LocalConnector()
