"""sudo that wants a password, where nobody is there to type one, is one host's trouble and not the end of the run."""

from __future__ import annotations

from pyinfra.connectors import util


def ask_nobody() -> None:
    """Have pyinfra's own question for a sudo password answered by PermissionError, which fails the host that wants one.

    Without a terminal pyinfra's getpass raises EOFError, which ends the run of every host. With one it would keep all
    hosts waiting, and then leave the password in a file on the node for a while, which no check may.
    """
    util.getpass = _nobody  # type: ignore[attr-defined, assignment]


def _nobody(prompt: str = "") -> str:
    raise PermissionError("sudo: a password is required")
