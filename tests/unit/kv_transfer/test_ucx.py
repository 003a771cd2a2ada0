import pytest

from twinpool.kv_transfer.connectors.choose import make_connector
from twinpool.kv_transfer.connectors.ucx import UcxSettings, read_transport

LOG = """
[1.0] [vm:1 :0]   | agent-1 self cfg#0                                       |
[1.0] [vm:1 :0]   | remote memory write by ucp_put* from host memory to host |
[1.0] [vm:1 :0]   | Range  | Description |              Config               |
[1.0] [vm:1 :0]   | 0..inf | zero-copy   | tcp/lo                            |
[1.0] [vm:1 :0]   | agent-1 intra-node cfg#1                                         |
[1.0] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1 :0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:1 :0]   | Range   | Description |                  Config                  |
[1.0] [vm:1 :0]   | 0..2047 | copy-out    | tcp/lo                                   |
[1.0] [vm:1 :0]   | 2K..inf | zero-copy   | {config} |
[1.0] [vm:1 :0]   | agent-10 intra-node cfg#1                                        |
[1.0] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1 :0]   | 0..inf | zero-copy   | sysv/memory                               |
"""


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("cma/memory", "shm"),
        ("tcp/eth0", "tcp"),
        ("50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0", "rdma"),
        ("cuda_ipc/cuda", "cuda_ipc"),
        ("something/new", "something"),
    ],
)
def test_the_transport_of_reads_is_found_in_the_log(config: str, name: str) -> None:
    assert read_transport(LOG.replace("{config}", config), "agent-1") == name


def test_an_agent_without_a_table_is_unknown() -> None:
    assert read_transport(LOG, "agent-2") is None


def test_loopback_workers_keep_ucx_on_loopback() -> None:
    assert UcxSettings.for_host("127.0.0.1") == UcxSettings(None, "lo")
    assert UcxSettings.for_host("localhost", "tcp", "eth1") == UcxSettings("tcp", "eth1")
    assert UcxSettings.for_host("10.0.0.1") == UcxSettings(None, None)


def test_connectors_are_chosen_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.kv_transfer.connectors.choose.nixl_installed", lambda: False)
    assert make_connector("auto", UcxSettings()).name == "nccl"
    with pytest.raises(Exception, match=r"pip install 'twinpool\[nixl\]'"):
        make_connector("nixl", UcxSettings())
