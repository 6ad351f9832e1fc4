"""The patch series, by content hash and by behaviour."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import APPLY, PROBE, stopped_files
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge


@operation()
def apply_series(spec: NodeSpec) -> Commands:
    """Take each file of the series to its target: patched, or pristine where no patch of it is wanted any more.

    Reads the observation; may run files/node/patch_files.py, keep_foreign.py, and `uv pip sync` for one distribution.
    A foreign file is copied and shown, and stops the host.
    """
    yield from converge(
        spec,
        APPLY,
        f"{len(spec.patches)} patches are applied",
        lambda state, changes: node.apply_patches(spec, state),
        refuse=lambda state: [node.keep_foreign(spec, state, found)] if (found := stopped_files(spec, state)) else [],
    )


@operation()
def probe(spec: NodeSpec) -> Commands:
    """Prove in the venv that the patches do what they are for. Reads the observation; may run the venv's Python."""
    yield from converge(spec, PROBE, "probed since the last change", lambda state, changes: node.probe_patches(spec))
