"""The patch series, by content hash and by behaviour."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand

from gpuwright import node
from gpuwright.patches import FileState, patched_files
from gpuwright.plan import APPLY, PROBE, Change
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from operations.stage import converge


@operation()
def apply_series(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Take each file of the series to its post-image. Reads the observation; may run files/node/patch_files.py."""

    def build(state: NodeState, changes: list[Change]) -> list[node.NodeCommand | PyinfraCommand]:
        stale = [f for f in patched_files(spec.patches) if f.state(state.patched.get(f.path)) is not FileState.APPLIED]
        site = state.venv.site if state.venv else spec.paths.venv
        return list(node.apply_patches(spec, [file.request() for file in stale], site))

    yield from converge(spec, APPLY, f"{len(spec.patches)} patches are applied", build)


@operation()
def probe(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Prove in the venv that the patches do what they are for. Reads the observation; may run the venv's Python."""
    yield from converge(
        spec, PROBE, "probed since the last change", lambda state, changes: list(node.probe_patches(spec))
    )
