"""flashinfer's fp4_quantize under torch.compile on a real GPU: before any patch, with the first, with the series.

usage, on a machine with an NVIDIA GPU, torch and nvcc:
    python3 benchmarks/fp4_gpu.py WHEELS OUT.json
WHEELS is a folder with the wheels of flashinfer-python 0.6.3, apache-tvm-ffi, nvidia-cudnn-frontend, einops, tabulate,
nvidia-ml-py and whatever else is missing there. Each case runs in a process of its own over a fresh copy of flashinfer,
patched by files/node/unidiff.py from files/patches/series.yaml, with the post-image's sha256 checked.

Measured: what Dynamo says; whether eager, inductor and CUDA graph capture and replay run, for several numbers of rows;
shapes and dtypes against the uncompiled kernel's; the time of one eager call. Not measured: values. flashinfer's kernel
writes no FP4 values on sm_90, so on Hopper there is nothing to compare; on SM100 and SM120 the script compares them.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = (7, 128, 300, 1)
K = 7168  # GLM-5's hidden size is a multiple of 64, as the swizzled scale layout needs
CASES = {
    "pristine": [],
    "first patch": ["flashinfer-cuda-version-from-torch"],
    "rejected": ["flashinfer-cuda-version-from-torch", "fp4-quantize-compiler-disable"],
    "series": ["flashinfer-cuda-version-from-torch", "flashinfer-fp4-quantize-opaque-op"],
}


def unidiff():
    spec = importlib.util.spec_from_file_location("unidiff", REPOSITORY / "files" / "node" / "unidiff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patch(site, ids):
    import yaml

    series = {
        row["id"]: row for row in yaml.safe_load((REPOSITORY / "files/patches/series.yaml").read_text())["patches"]
    }
    for name in ids:
        row = series[name]
        path = site / row["file"]
        diff = (REPOSITORY / "files" / "patches" / row["diff"]).read_bytes()
        result = unidiff().apply_diff(path.read_bytes(), diff)
        assert hashlib.sha256(result).hexdigest() == row["post_sha256"], name
        path.write_bytes(result)


def one_case():
    """Runs in the child: prints one JSON."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._logging.set_logs(graph_breaks=False)
    from flashinfer import fp4_quantize

    answer = {"layouts": {}}
    scale = torch.ones((), dtype=torch.float32, device="cuda")
    for swizzled in (True, False):

        def call(x, swizzled=swizzled):
            return fp4_quantize(x, scale, is_sf_swizzled_layout=swizzled)

        rows = {m: torch.randn(m, K, dtype=torch.bfloat16, device="cuda") for m in ROWS}
        eager = {m: call(x) for m, x in rows.items()}
        found = {"uncompiled": {m: [[list(t.shape), str(t.dtype)] for t in out] for m, out in eager.items()}}
        for backend in ("eager", "inductor"):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            compiled = torch.compile(call, fullgraph=True, backend=counter)
            try:
                same, equal = [], []
                for m in ROWS:
                    x = rows[m]
                    torch._dynamo.maybe_mark_dynamic(x, 0)
                    out = compiled(x)
                    torch.cuda.synchronize()
                    same.append(
                        all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(out, eager[m], strict=True))
                    )
                    equal.append(all(torch.equal(a, b) for a, b in zip(out, eager[m], strict=True)))
                found[backend] = {"shapes and dtypes as uncompiled": all(same), "compilations": counter.frame_count}
                if torch.cuda.get_device_capability()[0] >= 10:
                    found[backend]["values as uncompiled"] = all(equal)
            except Exception as error:
                text = str(error)
                context = next((row.strip() for row in text.splitlines() if "debug context" in row), "")
                found[backend] = {"error": type(error).__name__, "first line": text.splitlines()[0], "context": context}
                continue
            graphs = {}
            for m in ROWS:
                x = rows[m]
                graph = torch.cuda.CUDAGraph()
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    compiled(x)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = compiled(x)
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                graphs[m] = [list(t.shape) for t in out] == [list(t.shape) for t in eager[m]]
            found[backend]["captured and replayed"] = graphs
        answer["layouts"]["swizzled" if swizzled else "linear"] = found
    x = torch.randn(128, K, dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(2000):
            fp4_quantize(x, scale)
        times.append((time.perf_counter() - begin) / 2000 * 1e6)
        torch.cuda.synchronize()
    answer["eager call, us of host time"] = {
        "median": round(statistics.median(times), 2),
        "all": [round(t, 2) for t in times],
    }
    print(json.dumps(answer))


def main():
    wheels, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    work = Path(tempfile.mkdtemp())
    base = work / "base"
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(base),
    ]
    subprocess.run([*pip, *files], check=True)
    import torch

    answer = {
        "gpu": torch.cuda.get_device_name(0), "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0],
        "wheels": [Path(name).name for name in files], "k": K, "rows": list(ROWS), "cases": {},
    }  # fmt: skip
    for name, ids in CASES.items():
        site = work / name.replace(" ", "-")
        shutil.copytree(base, site)
        patch(site, ids)
        env = dict(
            os.environ, PYTHONPATH=str(site), FLASHINFER_WORKSPACE_BASE=str(work / "jit"), PYTHONDONTWRITEBYTECODE="1"
        )
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "--case"], env=env, capture_output=True, text=True)
        seconds = round(time.perf_counter() - begin, 1)
        try:
            case = json.loads(done.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            case = {"failed": done.stderr[-3000:]}
        answer["cases"][name] = {"patches": ids, "seconds": seconds, **case}
        print(name, seconds, "s", "failed" if "failed" in case else "", flush=True)
        out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    one_case() if sys.argv[1:] == ["--case"] else main()
