"""The model stage of a deploy: fetched from a hub, found whole, mended; and folders that no server could load.

The tests share the lab's node and build on each other, in the order of this file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwright import plan as p
from tests import hub as hubs
from tests.hub import Fault, Hub
from tests.lab.conftest import Lab, Run, ok

REVISION = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"


class Fetched:
    """The lab's node with the model of a hub, which serves the lab's own tiny model."""

    def __init__(self, lab: Lab, hub: Hub, folder: Path) -> None:
        self.lab, self.hub, self.folder = lab, hub, folder

    def deploy(self, kind: str = "hub", stages: str = "model", **more: str) -> Run:
        model = {"kind": kind, "path": str(self.folder), **more}
        if kind == "hub":
            model |= {"repo": self.hub.repo, "revision": REVISION, "endpoint": self.hub.endpoint}
        return self.lab.deploy("--data", f"stages={stages}", "--data", "model=" + json.dumps(model))


@pytest.fixture(scope="module")
def fetched(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetched]:
    ok(lab.deploy("--data", "stages=preflight,system,runtime,patches,model"))
    own = {path.name: path.read_bytes() for path in (lab.root / "model").iterdir() if path.is_file()}
    del own["gpuwright-model.json"]
    own["original/params.json"] = b"{}"
    with hubs.running(Hub("org/tiny", REVISION, own, {WEIGHTS}, token="hf_secret")) as hub:
        yield Fetched(lab, hub, tmp_path_factory.mktemp("hub") / "model")


def test_a_model_of_a_hub_is_fetched_and_its_config_read(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = fetched.deploy()
    assert refused.code != 0 and "set `token`" in refused.said
    monkeypatch.setenv("GPUWRIGHT_TEST_TOKEN", "hf_secret")
    fetched.hub.faults[WEIGHTS] = Fault("reset", after=100_000)
    run = ok(fetched.deploy(token="env:GPUWRIGHT_TEST_TOKEN"))
    assert run.changed == [p.MODEL, p.CONFIG]
    assert f"{fetched.folder}: expected org/tiny at 0123456789ab, found none" in run.said
    assert "all " in run.said and "files are verified" in run.said and "config.json: holds" in run.said
    paths = [path for path in fetched.folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    assert {str(path.relative_to(fetched.folder)): path.read_bytes() for path in paths} == fetched.hub.files
    assert "hf_secret" not in run.said
    assert not [
        f
        for f in fetched.lab.root.rglob("*")
        if f.is_file() and f.stat().st_size < 1 << 20 and b"hf_secret" in f.read_bytes()
    ]


def test_a_second_deploy_asks_the_hub_for_nothing(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWRIGHT_TEST_TOKEN", "hf_secret")
    before = len(fetched.hub.asked), len(fetched.hub.requests)
    assert ok(fetched.deploy(token="env:GPUWRIGHT_TEST_TOKEN")).changed == []
    assert (len(fetched.hub.asked), len(fetched.hub.requests)) == before


def test_a_file_that_was_changed_is_fetched_again(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWRIGHT_TEST_TOKEN", "hf_secret")
    weights = fetched.folder / WEIGHTS
    with weights.open("r+b") as handle:
        handle.seek(-4, 2)
        handle.write(b"edit")
    run = ok(fetched.deploy(token="env:GPUWRIGHT_TEST_TOKEN"))
    assert run.changed[:1] == [p.MODEL] and f"{weights}: expected as it was verified, found written since" in run.said
    assert weights.read_bytes() == fetched.hub.files[WEIGHTS]
    weights.unlink()
    assert "found absent" in ok(fetched.deploy(token="env:GPUWRIGHT_TEST_TOKEN")).said
    assert weights.read_bytes() == fetched.hub.files[WEIGHTS]


def test_a_shard_that_was_cut_off_stops_the_host_before_anything(fetched: Fetched) -> None:
    """A folder that someone filled by hand: its sizes are held against each shard's own header."""
    whole = ok(fetched.deploy("folder"))
    assert whole.changed == []
    weights = fetched.folder / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:-4096])
    said = f"{WEIGHTS} has {len(data) - 4096} bytes, and its header says {len(data)}"
    run = fetched.deploy("folder", stages="preflight,model")
    assert run.code != 0 and said in run.said and "model-whole: expected a whole model" in run.said
    weights.write_bytes(data)
    (fetched.folder / "x.safetensors.incomplete").write_bytes(b"")
    run = fetched.deploy("folder")
    assert run.code != 0 and "holds a download that was cut off: x.safetensors.incomplete" in run.said
    (fetched.folder / "x.safetensors.incomplete").unlink()


def test_a_config_that_the_pinned_transformers_cannot_read_stops_the_host(fetched: Fetched) -> None:
    config = fetched.folder / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"dtype": "float99"}))
    run = fetched.deploy("folder")
    assert (
        run.code != 0 and "config.json: ended with exit code 1" in run.said and "1 of 1 proofs do not hold" in run.said
    )
    config.write_text(text)
    assert ok(fetched.deploy("folder")).changed == [], "what was read before is read"
    shutil.rmtree(fetched.folder)
