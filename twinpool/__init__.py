"""twinpool serves language models from a prefill pool and a decode pool."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.async_client import AsyncClient
    from twinpool.client import Client
    from twinpool.tls import ClientTls

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "ClientTls", "__version__"]


def __getattr__(name: str) -> object:
    """Imports the clients on first use, so that programs which need none do not pay for them."""
    if name == "Client":
        from twinpool.client import Client

        return Client
    if name == "AsyncClient":
        from twinpool.async_client import AsyncClient

        return AsyncClient
    if name == "ClientTls":
        from twinpool.tls import ClientTls

        return ClientTls
    raise AttributeError(f"module twinpool has no attribute {name}")
