"""The error that ends a whole run because of bad input."""

from __future__ import annotations

from pyinfra.api.exceptions import PyinfraError


class StopRun(PyinfraError):
    """Bad input. pyinfra prints the message, and in front of it the line of code that raised the error; here the place
    that matters stands in the message, so there is no other to print.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)
