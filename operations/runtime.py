"""The venv, brought to the lock and proved."""

from __future__ import annotations

from pyinfra.api.command import FunctionCommand
from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import ADOPT, STUB, SYNC, TOOLS, VENV, VERIFY, WHEELS
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge
from operations.wheels import bring


@operation()
def bring_wheels(spec: NodeSpec) -> Commands:
    """Have the wheels of what is installed on a node that asks no index, from this machine or from another host of the
    run, and remove those of no lock. Reads the observation; may run files/node/take_wheels.py and pull_wheels.py, on
    other hosts serve_wheels.py, and send over SFTP.
    """
    yield from converge(
        spec,
        WHEELS,
        "the wheels that are needed are there" if spec.data.wheelhouse else "installed from an index",
        lambda state, changes: [FunctionCommand(bring, (spec, state), {})],
    )


@operation()
def install_tools(spec: NodeSpec) -> Commands:
    """Install uv and supervisor from their lock, in a venv of their own. Reads the observation; may run pip."""
    yield from converge(spec, TOOLS, "uv and supervisor are as locked", lambda state, changes: node.install_tools(spec))


@operation()
def create_venv(spec: NodeSpec) -> Commands:
    """Make the venv, of the declared Python. Reads the observation; may run `uv venv`."""
    yield from converge(
        spec,
        VENV,
        "the venv is there",
        lambda state, changes: node.create_venv(spec, state.interpreter),
    )


@operation()
def adopt(spec: NodeSpec) -> Commands:
    """Have the venv see an interpreter that someone else keeps, and record what of it. Reads the observation."""
    settled = f"{spec.data.adopt.interpreter} is as it was adopted" if spec.data.adopt else "nothing is adopted"
    yield from converge(spec, ADOPT, settled, lambda state, changes: node.adopt(spec, state))


@operation()
def sync_venv(spec: NodeSpec) -> Commands:
    """Sync the venv to the lock, hashes required. Reads the observation; may run `uv pip sync`."""
    yield from converge(
        spec,
        SYNC,
        f"{len(spec.lock.versions)} distributions are as locked",
        lambda state, changes: node.sync_venv(spec, state),
    )


@operation()
def build_cuda_stub(spec: NodeSpec) -> Commands:
    """On a node without a GPU, build the libcuda stand-in. Reads the observation; may run `cc`."""
    yield from converge(spec, STUB, "nothing to build", lambda state, changes: node.build_cuda_stub(spec))


@operation()
def verify(spec: NodeSpec) -> Commands:
    """Prove in the venv what the stack says must be true. Reads the observation; may run the venv's Python."""
    yield from converge(
        spec, VERIFY, "verified since the last change", lambda state, changes: node.verify_runtime(spec)
    )
