"""The one fact: everything the plan needs to know of a node, in one command."""

from __future__ import annotations

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

from gpuwright.errors import GpuwrightError
from gpuwright.state import NodeState, parse_observation


class Observation(FactBase[NodeState]):
    """A NodeState, or None when the host could not answer (pyinfra has then failed the host).

    The script goes in over stdin (`_stdin`), because a command line is limited to 128 KiB and nothing shall lie on the
    node. The login shell may print before and after it, so only the last line of JSON counts.
    """

    def command(self, line: str) -> str:
        """The command line that gpuwright.node.observe built."""
        return line

    def process(self, output: list[str]) -> NodeState:
        """Parse the answer; whatever is wrong in it fails this host alone."""
        try:
            return parse_observation("\n".join(output))
        except GpuwrightError as error:
            raise FactProcessError(str(error)) from error
