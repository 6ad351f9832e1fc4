"""The nodes that `make fleet` boots on this machine."""

from operations.limit import HostEntry, require_match
from operations.stop_run import StopRun
from tests.fleet.nodes import Fleet

_nodes = Fleet().nodes
if not _nodes:
    raise StopRun("there is no fleet: run `make fleet` (as root)")

fleet: list[HostEntry] = [(node.name, node.data()) for node in _nodes]
canary = fleet[:1]

require_match(fleet=fleet, canary=canary)
