"""The pure core: one desired state, one observed state, one difference between them. Never imports pyinfra."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
