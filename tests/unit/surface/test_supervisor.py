"""Children that serve, fail, crash, ignore signals or lose their parent; nothing may be left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from twinpool.child import ChildFailed, ChildSpec
from twinpool.port_picker import PortPicker
from twinpool.supervisor import Supervisor

FAKE = Path(__file__).with_name("fake_child.py")
SERVICE = "twinpool.inference.v1.InfoService"
LIMIT_S = 30


class Family:
    """A supervisor over fake children, with everything that it said."""

    def __init__(self, *behaviours: tuple[str, ...], drain_s: float = 20.0, silence_s: float = 60.0) -> None:
        self.lines: list[tuple[str, str]] = []
        self.reports: list[str] = []
        specs = []
        with closing(PortPicker()) as ports:
            for index, behaviour in enumerate(behaviours):
                port = ports.take("127.0.0.1", 0, "test", "")
                argv = (sys.executable, "-P", str(FAKE), str(port), *behaviour)
                address = f"127.0.0.1:{port}"
                specs.append(ChildSpec(f"child-{index}", argv, dict(os.environ), address, SERVICE, drain_s, silence_s))
        self.supervisor = Supervisor(specs, lambda name, line: self.lines.append((name, line)), self.reports.append)

    def pids(self) -> list[int]:
        return [int(line.removeprefix("pid ")) for _, line in self.lines if line.startswith("pid ")]

    async def __aenter__(self) -> Family:
        self.supervisor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()
        assert not [pid for pid in self.pids() if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_ready_then_drained() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("serve",), ("serve",)) as family:
        await family.supervisor.ready()
        assert len(family.pids()) == 2
    assert [line for _, line in family.lines if line == "drained"] == ["drained"] * 2
    assert family.reports == []


async def test_child_that_hangs_is_replaced() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("serve",), silence_s=3.0) as family:
        await family.supervisor.ready()
        os.kill(family.pids()[0], signal.SIGSTOP)
        while "child-0 is ready again" not in family.reports:
            await asyncio.sleep(0.05)
        assert any("has not answered" in report for report in family.reports)
        assert len(family.pids()) == 2


async def test_child_that_fails_at_start_ends_the_deployment_with_its_words() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("serve",), ("fail",)) as family:
        with pytest.raises(ChildFailed, match=r"^the weights are gone; put them back$") as caught:
            await family.supervisor.ready()
    assert caught.value.exit_code == 3


async def test_child_that_crashes_is_reported_and_comes_back(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S), Family(("crash-after", str(tmp_path / "file"))) as family:
        await family.supervisor.ready()
        failure = asyncio.create_task(family.supervisor.failure())
        while not any("ready again" in report for report in family.reports):
            await asyncio.sleep(0.05)
        assert not failure.done()
        failure.cancel()
    assert "child-0 ended with exit code 9: pid" in family.reports[0]
    assert "starting it again in" in family.reports[0]
    assert len(set(family.pids())) == 2


async def test_killed_child_is_reported_with_its_signal() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("serve",)) as family:
        await family.supervisor.ready()
        os.kill(family.pids()[0], signal.SIGKILL)
        while not family.reports:
            await asyncio.sleep(0.05)
    assert "was killed by SIGKILL (" in family.reports[0]
    assert "pid" not in family.reports[0]  # no last words: it had no time for any


async def test_stubborn_child_and_its_children_are_killed_after_the_grace() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("stubborn",), drain_s=0.3) as family:
        await family.supervisor.ready()
        while len(family.pids()) < 2:
            await asyncio.sleep(0.05)


async def test_second_interrupt_cuts_the_drain_short() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("stubborn",), drain_s=600) as family:
        await family.supervisor.ready()
        stopping = asyncio.create_task(family.supervisor.stop())
        await asyncio.sleep(0.3)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not [pid for pid in family.pids() if alive(pid)]


async def test_stop_before_ready_leaves_nothing() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("hang",), ("serve",)) as family:
        while len(family.pids()) < 2:
            await asyncio.sleep(0.05)


async def test_stop_right_after_start_leaves_nothing() -> None:
    async with asyncio.timeout(LIMIT_S), Family(("serve",), ("serve",)):
        await asyncio.sleep(0)


_PARENT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_supervisor import Family
async def main():
    async with Family(("serve",)) as family:
        await family.supervisor.ready()
        print(family.pids()[0], flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_children_end_when_the_parent_is_killed() -> None:
    code = _PARENT.format(folder=str(FAKE.parent))
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    async with asyncio.timeout(LIMIT_S):
        while alive(child):
            await asyncio.sleep(0.05)
