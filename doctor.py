"""Say whether a node can do the job, and what to do where it cannot: pyinfra inventory/gpu.py doctor.py [--limit …]

Changes nothing. Exit code 0: every `must` holds; 2: one does not, or cannot be observed; 1: a host could not be asked.
--json prints the verdicts; --data save_observation=FOLDER keeps what was seen, for `python -m gpuwright doctor`.
"""

from pyinfra import config

from operations import doctor

config.REQUIRE_PYINFRA_VERSION = "==3.10.0"

doctor.visit_host()
