"""The lab: this very machine, without a GPU."""

from operations.limit import require_match

lab = ["@local"]

require_match(lab=lab)
