"""Who may become a rank: only who shows a token of the rank and plane that it claims, once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from twinpool.engine.channel import ChannelClosed
from twinpool.worker import rank_dial
from twinpool.worker.rank_dial import RankDials, dial

HOST = "127.0.0.1"


@pytest.fixture
def dials() -> Iterator[RankDials]:
    made = RankDials(HOST, [1, 2])
    yield made
    made.close()


def test_both_channels_of_each_rank_connect_and_the_listener_goes(dials: RankDials) -> None:
    for rank in (2, 1):
        step, transfer, own = dial(HOST, dials.port, rank, dials.tokens(rank))
        assert own == HOST
        ours = dials.channels(rank)
        for theirs, mine in zip((step, transfer), ours, strict=True):
            theirs.send(b"a", b"b")
            assert mine.receive() == b"ab"
            mine.send(b"c")
            assert theirs.receive() == b"c"
        ours[0].close()
        with pytest.raises(ChannelClosed):
            step.receive()
        ours[1].close()
    for _ in range(100):  # the last handshake's thread closes it
        try:
            socket.create_connection((HOST, dials.port), 1).close()
        except ConnectionRefusedError:
            return
    pytest.fail("still listening")


def test_a_wrong_rank_a_wrong_token_and_a_used_token_are_refused(dials: RankDials) -> None:
    good = dials.tokens(1)
    for rank, tokens in ((2, good), (1, "00" * 64), (7, good), (1, good[64:] + good[:64])):
        with pytest.raises(OSError, match=r"closed|reset"):
            dial(HOST, dials.port, rank, tokens)
    dial(HOST, dials.port, 1, good)
    with pytest.raises(OSError, match=r"closed|reset"):
        dial(HOST, dials.port, 1, good)
    with pytest.raises(KeyError):
        dials.tokens(1)
    assert dials.tokens(2)


def test_silence_and_nonsense_end_and_harm_nobody(dials: RankDials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_dial, "HANDSHAKE_S", 0.2)
    silent, rude = (socket.create_connection((HOST, dials.port), 5) for _ in range(2))
    rude.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x" * 100)
    for connection in (silent, rude):
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            continue
        finally:
            connection.close()
    monkeypatch.undo()
    dial(HOST, dials.port, 1, dials.tokens(1))


def test_who_waits_for_a_rank_that_will_not_come_is_told_why(dials: RankDials) -> None:
    step, transfer = dials.channels(1)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(ChannelClosed) as error:
            step.receive()
        said.append(str(error.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    dials.give_up(1, "no room")
    waiting.join(10)
    assert said == ["no room"]
    with pytest.raises(ChannelClosed, match="no room"):
        transfer.send(b"x")
    transfer.close()
    late, _, _ = dial(HOST, dials.port, 1, dials.tokens(1))
    with pytest.raises(ChannelClosed):
        late.receive()
