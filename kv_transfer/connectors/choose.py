"""Which connector a worker uses."""

from __future__ import annotations

import importlib.util
from typing import Literal

from twinpool.kv_transfer.connectors.base import Connector, ConnectorError
from twinpool.kv_transfer.connectors.ucx import UcxSettings

ConnectorKind = Literal["auto", "nixl", "nccl", "local"]


def nixl_installed() -> bool:
    """Whether the nixl package can be found (it is not imported)."""
    return importlib.util.find_spec("nixl") is not None


def make_connector(kind: ConnectorKind, ucx: UcxSettings) -> Connector:
    """Makes the connector of this rank; ``auto`` takes nixl where it is installed, else local; its ``name`` tells.

    Raises ConnectorError with a remedy when the asked one cannot work here.
    """
    if kind == "auto":
        kind = "nixl" if nixl_installed() else "local"
    if kind == "nixl":
        if not nixl_installed():
            raise ConnectorError("transport.connector is nixl, but nixl is not installed: pip install 'twinpool[nixl]'")
        # Before nixl is imported, too: it configures its logging then.
        ucx.apply()
        from twinpool.kv_transfer.connectors.nixl import NixlConnector

        return NixlConnector(ucx)
    if kind == "local":
        from twinpool.kv_transfer.connectors.local import LocalConnector

        return LocalConnector()
    raise ConnectorError(f"transport.connector {kind} is not available in this version; use nixl or local")
