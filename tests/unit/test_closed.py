"""Internal services are closed: workers that others can reach need a token, and local deployments draw one."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.config import Config, ModelConfig, RouterSection, SessionSection
from twinpool.errors import ConfigError
from twinpool.launcher import prepare
from twinpool.progress import Progress
from twinpool.worker.addresses import check_closed


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
def test_a_reachable_worker_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"session\.token is not set; set the same TWINPOOL_SESSION__TOKEN"):
        check_closed(host, None, "decode.host")
    check_closed(host, "secret", "decode.host")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    check_closed(host, None, "decode.host")


def test_a_local_deployment_draws_its_own_token(tiny_llama: Path) -> None:
    router = RouterSection(grpc_port=0, http_port=0)
    config = Config(model=ModelConfig(path=str(tiny_llama)), router=router)

    def tokens(given: Config) -> set[str | None]:
        return {spec.environment.get("TWINPOOL_SESSION__TOKEN") for spec in prepare(given, Progress()).specs}

    first, second = tokens(config), tokens(config)
    assert len(first) == 1
    assert first.isdisjoint({None, ""})
    assert first != second
    given = config.model_copy(update={"session": SessionSection(token="ours")})
    assert tokens(given) == {"ours"}
