"""What every node has unless its group says otherwise. docs/reference.md explains each key."""

stack = "sglang-0.5.9-cu128"  # catalog/stacks/
tier = "baseline"  # one of the ladder's tiers, catalog/tiers.yaml
python = "3.12"  # the venv's; the stack says which are locked

root = "/opt/gpuwright"
bind = "127.0.0.1"
port = 30000

ready_timeout_s = 2700  # weights, cold JIT and graph capture together
min_memory_gib = 64
min_free_disk_gib = 15  # the stack takes about 10
