"""The core's way to the code that runs on a node, where both must do the very same."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from gpuwright import REPOSITORY


@cache
def node_module(name: str) -> ModuleType:
    """files/node/<name>.py as a module. Only those that need no request: unidiff, engine_flags, raw_facts, machine."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "files" / "node" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
