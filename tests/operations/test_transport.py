"""The transport under every connection: what ends it, and what it reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import paramiko
import pytest

from operations import transport


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, transport.Transport]]:
    """A TCP connection, and a transport over it whose SSH was never begun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
    made = transport.make_transport(sock)
    assert isinstance(made, transport.Transport)
    yield sock, made
    sock.close()


def test_a_peer_that_is_gone_is_noticed(connection: tuple[socket.socket, Any]) -> None:
    sock, _ = connection
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == transport.GONE_S * 1000
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert transport.KEEPALIVE_S < transport.GONE_S, "something must be unanswered by then"


def test_a_connection_that_ended_is_an_error_of_ssh(
    connection: tuple[socket.socket, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyinfra takes an EOFError for a bug of its own, and ends the run of every host."""

    def end(self: object, data: object) -> None:
        raise EOFError

    made = connection[1]
    made.saved_exception = EOFError()
    assert str(made.get_exception()) == "the node closed the connection"
    made.saved_exception = OSError("no route")
    assert str(made.get_exception()) == "no route", "others are left as they are"
    monkeypatch.setattr(paramiko.Transport, "_send_user_message", end)
    with pytest.raises(paramiko.SSHException, match="the node closed the connection"):
        made._send_user_message(b"")


def test_any_output_can_be_read() -> None:
    class Channel:
        parts = [b"caf\xe9\nw\xc3", b"\xa4re"]

        def recv(self, size: int) -> bytes:
            return self.parts.pop(0) if self.parts else b""

    lines: Any = transport.Lines(Channel())
    assert list(lines) == ["caf\ufffd\n", "wäre"]
