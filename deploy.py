"""Bring a node to its declared state: pyinfra inventory/gpu.py deploy.py [--limit canary] [--dry | -y]

--data stages=runtime,patches runs some stages; --data tier=piecewise another tier; --data smoke=always|never, --data
profile=full how it is measured; --data gate=baseline fails a host that is slower than that tier.
"""

from pyinfra import config

from operations import launchers, model, patches, preflight, runtime, service, smoke, system
from operations.stage import desired_state

config.REQUIRE_PYINFRA_VERSION = "==3.10.0"

spec = desired_state()

preflight.ask_canary(name="preflight | ask the canary", spec=spec)

if "preflight" in spec.stages:
    preflight.check_node(name="preflight | check the node", spec=spec)

if "system" in spec.stages:
    system.create_folders(name="system | create the node's folders", spec=spec)
    system.set_host(
        name="system | set what the host needs",
        spec=spec,
        **({"_sudo": True, "_sudo_user": "root"} if spec.data.settings_sudo else {}),
    )

if "runtime" in spec.stages:
    runtime.bring_wheels(name="runtime | bring wheels", spec=spec)
    runtime.install_tools(name="runtime | install uv and supervisor", spec=spec)
    runtime.create_venv(name="runtime | create the venv", spec=spec)
    runtime.adopt(name="runtime | adopt an interpreter", spec=spec)
    runtime.sync_venv(name="runtime | sync venv to lock", spec=spec)
    runtime.build_cuda_stub(name="runtime | build the libcuda stand-in", spec=spec)
    runtime.verify(name="runtime | verify what must be true", spec=spec)

if "patches" in spec.stages:
    patches.apply_series(name="patches | apply the series", spec=spec)
    patches.probe(name="patches | probe behaviour", spec=spec)

if "model" in spec.stages:
    model.provide_model(name="model | make, fetch or check the model", spec=spec)
    model.read_config(name="model | read its config with the pinned transformers", spec=spec)

if "launchers" in spec.stages:
    launchers.write_scripts(name="launchers | write launch scripts", spec=spec)

if "service" in spec.stages:
    service.configure(name="service | configure supervisor", spec=spec)
    service.run_tier(name="service | run the active tier", spec=spec)
    service.prune_caches(name="service | prune unused JIT caches", spec=spec)
    service.record(name="service | record the deployed state", spec=spec)

if "smoke" in spec.stages:
    smoke.benchmark(name="smoke | benchmark the active tier", spec=spec)
    smoke.gate(name="smoke | hold it against another tier", spec=spec)
