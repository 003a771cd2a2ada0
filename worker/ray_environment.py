"""The environment of our Ray processes: what Ray reads before anything else of it runs.

Ray listens on one address only if that is 127.0.0.1, and then replaces it by one that others can reach unless it is
told that there is no cluster beyond this machine. On any other address its C++ processes listen on all interfaces;
what protects them is Ray's own token, which every one of their ports asks for, and the network (docs/architecture.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os

from twinpool.config import Config
from twinpool.kv_transfer.connectors.ucx import is_loopback

RECONNECT_S = 5
"""A node of ours leaves when its head has been gone for so long. Ranks do not notice either."""


def driver_environment(host: str) -> dict[str, str]:
    """For a process that connects to a cluster whose head is at ``host``."""
    common = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    return common | ({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if is_loopback(host) else {})


def own_environment(config: Config, host: str) -> dict[str, str]:
    """For processes of a cluster of ours, nodes and drivers, on the node at ``host``."""
    environment = driver_environment(host) | {
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        # Ray would free memory by ending its largest worker; ours are tiny, and the ranks are not Ray's.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    if config.session.token is not None:
        # Derived, so that who reads a Ray process's environment does not learn the cluster token.
        token = hmac.new(config.session.token.encode(), b"ray", hashlib.sha256).hexdigest()
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return environment


def node_environment(config: Config, host: str) -> dict[str, str]:
    """The whole environment of a node of ours; what configures twinpool stays out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINPOOL_")}
    return kept | own_environment(config, host)
