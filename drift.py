"""Say where nodes have left their declared state: pyinfra inventory/gpu.py drift.py -y [--limit …] [--diff]

Changes nothing, and sends each host one command. Exit code 0: every host is as declared; 2: one has drifted; 1: one
could not be judged. For cron and CI there is check.py, which writes reports, also where no host can be reached.
"""

from pyinfra import config

from operations import drift

config.REQUIRE_PYINFRA_VERSION = "==3.10.0"

drift.visit_host()
