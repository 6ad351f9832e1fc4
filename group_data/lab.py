"""This machine as a node: no GPU, a tiny model, everything under .lab/ in the checkout."""

import os
import sys
from pathlib import Path

_checkout = Path(__file__).resolve().parent.parent
_own = f"{sys.version_info.major}.{sys.version_info.minor}"

ladder = "lab-cpu"
device = "cpu"
root = str(_checkout / ".lab" / "node")
port = 31000
supervisor = "supervisor"  # nothing outside .lab/, whatever PID 1 is

# The Python that runs pyinfra, where the stack is locked for it: the one version that is surely here.
python = _own if _own in ("3.10", "3.11", "3.12") else "3.12"
interpreter = os.path.realpath(sys.executable) if python == _own else None

model = {"kind": "tiny"}

ready_timeout_s = 300
min_memory_gib = 6
# The noise floor is what benchmarks/gate.py shows of two cores that are shared with others: docs/performance.md.
_lengths = {"input_len": 64, "output_len": 32, "min_duration_s": 0.3, "noise": 0.3}
profiles = {
    "smoke": {"levels": [1, 4, 10], "prompts_per_concurrency": 8, "min_prompts": 16, **_lengths},
    "full": {"levels": [1, 4, 10, 32], "prompts_per_concurrency": 64, "min_prompts": 128, "repeats": 5, **_lengths},
}
