"""Bringing wheels: one command, of what the node lacks; nothing where it lacks nothing. tests/fleet sends them."""

from __future__ import annotations

import logging

import pytest
from pyinfra.api.command import FunctionCommand

from operations import runtime, wheels
from tests.make import empty_state, lab_spec, settled_state
from tests.operations.conftest import Collect


def test_what_a_node_lacks_is_brought(collect: Collect, caplog: pytest.LogCaptureFixture) -> None:
    spec = lab_spec(wheelhouse="/none")
    old = settled_state(spec, wheels={"old-1.0-py3-none-any.whl": 1})
    (command,) = collect(runtime.bring_wheels, spec, old)
    assert isinstance(command, FunctionCommand)
    assert command.function is wheels.bring and command.args == (spec, old)
    caplog.set_level(logging.DEBUG, logger="pyinfra")
    assert collect(runtime.bring_wheels, spec, settled_state(spec)) == []
    assert "the wheels that are needed are there" in caplog.text


def test_what_this_machine_lacks_stops_the_host(collect: Collect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="pyinfra")
    spec = lab_spec(wheelhouse="/none")
    (command,) = collect(runtime.bring_wheels, spec, empty_state(spec))
    assert "runtime | bring wheels: stopped; nothing of this step was changed" in str(command)
    assert "-> make wheelhouse STACK=sglang-0.5.9-cu128 PYTHON=3.12 TO=/none" in caplog.text
