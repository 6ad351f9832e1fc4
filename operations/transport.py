"""SSH as a fleet needs it: without the 40 ms, a node that is gone is noticed, whatever a node prints can be read."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Any

import paramiko
from paramiko.channel import ChannelFile, ChannelStderrFile

KEEPALIVE_S = 30  # firewalls forget a quiet connection; and a node that is gone leaves this unanswered
GONE_S = 90  # the kernel's own patience is a quarter of an hour; a cable that is put back sooner is never noticed


def make_transport(sock: Any, **options: Any) -> paramiko.Transport:
    """A paramiko transport over `sock` with TCP_NODELAY and keepalive, for `ssh_paramiko_connect_kwargs`. It ends when
    the node has acknowledged nothing for GONE_S: what runs over it then fails, for this host alone.

    Measured on loopback: 100 commands 5.2 s without, 0.89 s with. A ProxyCommand's socket has no such options.
    """
    if hasattr(sock, "setsockopt"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)
    transport = Transport(sock, **options)
    transport.set_keepalive(KEEPALIVE_S)
    return transport


class Transport(paramiko.Transport):
    """One whose errors are those that pyinfra takes for a host's own, and that can read any output."""

    def get_exception(self) -> Exception | None:
        """As paramiko's, but a connection that ended is an SSHException: an EOFError would end every host's run."""
        error: Exception | None = super().get_exception()
        return _closed() if isinstance(error, EOFError) else error

    def _send_user_message(self, data: Any) -> None:
        """As paramiko's, which all that is sent over a channel goes through; the same holds of its EOFError."""
        try:
            super()._send_user_message(data)  # type: ignore[misc]
        except EOFError:
            raise _closed() from None

    def open_channel(self, *arguments: Any, **options: Any) -> paramiko.Channel:
        """As paramiko's, but a line that is not UTF-8 is read as well as it can be, and does not end the reading."""
        channel = super().open_channel(*arguments, **options)
        for name, kind in (("makefile", Lines), ("makefile_stderr", StderrLines)):
            setattr(channel, name, functools.partial(kind, channel))
        return channel


def _closed() -> paramiko.SSHException:
    return paramiko.SSHException("the node closed the connection")


class Lines(ChannelFile):
    """A command's output by line; what is not UTF-8 in it becomes U+FFFD."""

    def __init__(self, channel: paramiko.Channel, mode: str = "r", bufsize: int = -1) -> None:
        super().__init__(channel, f"{mode}b", bufsize)

    def readline(self, size: int | None = None) -> str:
        """The next line with its end, or "" at the end."""
        line: bytes = super().readline(size)
        return line.decode("utf-8", "replace")


class StderrLines(Lines, ChannelStderrFile):
    """The same of its error output."""
