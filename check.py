#!/usr/bin/env python3
"""The drift check for cron and CI: python check.py inventory/gpu.py [--limit …] [--json F] [--junit F] [--prom F]"""

import sys

import pyinfra_cli  # noqa: F401  (first: it has gevent patch the standard library)

from operations.check import main

sys.exit(main(sys.argv[1:]))
