"""This very machine as an H200 node."""

from operations.limit import require_match

h200 = ["@local"]

require_match(h200=h200)
