"""The lab: this very machine, without a GPU."""

from gpuwright.limit import require_match

lab = ["@local"]

require_match(lab=lab)
