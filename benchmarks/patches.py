"""How long patching and checking take on an installed venv: benchmarks/patches.py [ROOT of a lab node].

Apply and verify: the patched files of the venv, pristine, in a temporary site-packages; the node script brings them to
the series and a second run verifies them, each including the start of Python. Integrity: the observation of a deploy,
and the same without hashing, on the real venv; the difference is what hashing every text file costs. Deep: the
observation that reads everything, twice. Medians of five, but for the deep ones. Changes nothing in the venv.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuwright.node import observe, script
from gpuwright.patches import patched_files
from gpuwright.state import parse_observation
from tests.make import lab_spec

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def seconds(text: str) -> tuple[float, str]:
    """Run a node script as a node does."""
    begin = time.perf_counter()
    done = subprocess.run(["python3", "-I", "-u", "-"], input=text, capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, done.stdout


def median(times: list[float]) -> str:
    return f"median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, {len(times)} runs)"


def main() -> None:
    root = str(Path(sys.argv[1] if sys.argv[1:] else ".lab/node").resolve())
    spec = lab_spec(root=root, python=PYTHON)
    files = [file for file in patched_files(spec, {}) if file.chain]
    apply, verify = [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "site")
            for file in files:
                (site / file.path).parent.mkdir(parents=True, exist_ok=True)
                (site / file.path).write_bytes(Path(spec.paths.originals, file.pristine).read_bytes())
            Path(folder, "originals").mkdir()
            request = {
                "site": str(site), "originals": f"{folder}/originals", "manifest": f"{folder}/applied.json",
                "stamp": f"{folder}/stamp", "files": [file.request() for file in files],
            }  # fmt: skip
            apply.append(seconds(script("patch_files", request))[0])
            verify.append(seconds(script("patch_files", request))[0])
    print(f"apply the series ({len(files)} files): {median(apply)}; verify it: {median(verify)}")
    text = observe(spec).stdin
    state = parse_observation(seconds(text)[1])
    assert state.venv is not None
    with_text = [seconds(text)[0] for _ in range(5)]
    print(f"observation, every text file of {len(state.venv.distributions)} distributions hashed: {median(with_text)}")
    bare = text.replace(
        'venv(REQUEST["venv"], patched, deep_cache)', 'venv(REQUEST["venv"], patched, deep_cache, hashes=False)'
    )
    assert bare != text
    without = [seconds(bare)[0] for _ in range(5)]
    difference = statistics.median(with_text) - statistics.median(without)
    print(f"the same without hashing: {median(without)}; so hashing costs {difference:.2f} s")
    remembered = Path(spec.paths.run, "integrity.json")
    remembered.unlink(missing_ok=True)
    deep = observe(lab_spec(root=root, python=PYTHON, integrity="deep")).stdin
    print(f"deep, everything read: {seconds(deep)[0]:.1f} s; again, nothing changed: {seconds(deep)[0]:.2f} s")
    remembered.unlink(missing_ok=True)


main()
