"""The node's folders, and what the host is set to."""

from __future__ import annotations

from pyinfra import host, logger  # type: ignore[attr-defined]
from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import FOLDERS, SETTINGS
from gpuwright.spec import NodeSpec
from gpuwright.system import waiting
from operations.stage import Commands, converge, observed


@operation()
def create_folders(spec: NodeSpec) -> Commands:
    """Make the folders under `root` with their modes. Reads the observation; may run `install -d`."""
    yield from converge(spec, FOLDERS, "the folders are there", lambda state, changes: node.make_folders(spec))


@operation()
def set_host(spec: NodeSpec) -> Commands:
    """Make the declared settings of the host so, and put back those no longer declared. What counts only after a reboot
    is said each time. Reads the observation; may run files/node/settings.py.
    """
    settled = f"{len(spec.system)} settings of the host are as declared" if spec.system else "no setting is declared"
    yield from converge(spec, SETTINGS, settled, lambda state, changes: node.set_host(spec, state), in_part=True)
    found = observed(spec)
    for each in waiting(spec.system, found.readings) if found else ():
        host.log(f"    ! not done yet: {each}", logger.warning)
