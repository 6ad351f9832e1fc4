"""The patch series, by content hash and by behaviour."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.patches import FileState, patched_files
from gpuwright.plan import APPLY, PROBE, Change
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from operations.stage import Commands, converge


@operation()
def apply_series(spec: NodeSpec) -> Commands:
    """Take each file of the series to its post-image. Reads the observation; may run files/node/patch_files.py."""

    def build(state: NodeState, changes: list[Change]) -> list[node.NodeCommand]:
        stale = [f for f in patched_files(spec.patches) if f.state(state.patched.get(f.path)) is not FileState.APPLIED]
        site = state.venv.site if state.venv else spec.paths.venv
        return node.apply_patches(spec, [file.request() for file in stale], site)

    yield from converge(spec, APPLY, f"{len(spec.patches)} patches are applied", build)


@operation()
def probe(spec: NodeSpec) -> Commands:
    """Prove in the venv that the patches do what they are for. Reads the observation; may run the venv's Python."""
    yield from converge(spec, PROBE, "probed since the last change", lambda state, changes: node.probe_patches(spec))
