"""End a node's server with all its children, and supervisor: pyinfra inventory/lab.py stop.py -y"""

from pyinfra import config

from operations import service
from operations.stage import desired_state

config.REQUIRE_PYINFRA_VERSION = "==3.10.0"

service.stop(name="service | stop the server", spec=desired_state(serving=False, secrets=False))
