"""The containers of `make fleet`: real nodes with systemd, on which everything but the engine itself can be tried."""

stack = "sources-only"  # nothing of it can be imported, so
serve = False  # scripts and units are there, and no server
ladder = "fleet"
device = "cpu"
python = "3.11"  # Debian's
model = {"kind": "tiny"}
port = 31000
min_memory_gib = 1
min_free_disk_gib = 1
system = {"shared-memory": 1, "open-files": True, "locked-memory": True}
profiles = {"smoke": {"levels": [1], "input_len": 64, "output_len": 32}}
