"""What every node has unless its group says otherwise. docs/reference.md explains each key."""

from operations.transport import make_transport

stack = "sglang-0.5.9-cu128"  # catalog/stacks/
tier = "baseline"  # one of the ladder's tiers, catalog/tiers/<stack>.yaml
python = "3.12"  # the venv's; the stack says which are locked
# Where packages come from: the public index; another (index = "https://…/simple", index_credentials = "env:NAME"); or a
# folder of wheels on this machine (wheelhouse = "wheelhouse", after `make wheelhouse`). docs/runtime.md.
index = None
wheelhouse = None
# Environment of uv and pip on the node: proxies (HTTPS_PROXY), certificates. It is seen in the node's process list, so
# no credentials. UV_SYSTEM_CERTS: trust what the node trusts, a company's own CA included.
installer_env = {"UV_SYSTEM_CERTS": "1"}

root = "/opt/gpuwright"
bind = "127.0.0.1"
port = 30000

supervisor = "auto"  # systemd where it is PID 1 and the deploy is root, else supervisor from the package index
unit = "sglang-server"  # the systemd unit's name
# API keys and tokens by name, from this machine: {"api-key": "env:GPUWRIGHT_API_KEY", "HF_TOKEN": "file:~/.hf-token"}
secrets: dict[str, str] = {}

ready_timeout_s = 2700  # weights, cold JIT and graph capture together
min_memory_gib = 64
min_free_disk_gib = 15  # the stack takes about 10

profile = "smoke"  # what the smoke stage runs: minutes; --data profile=full decides about a tier
gate = "off"  # a tier of the ladder: a level slower than it beyond noise fails the host
canary_gate = "on"  # other hosts get only what a host of group canary has a passing result for

# How hosts are reached. A host key that is not in known_hosts is refused; add it with ssh-keyscan, after checking it.
ssh_strict_host_key_checking = "yes"
ssh_paramiko_connect_kwargs = {"transport_factory": make_transport}
