"""The engine's argument definitions, read without importing it."""

from __future__ import annotations

from gpuwright.catalogue import flags_path, load_catalogue
from gpuwright.flags import Flag, dump_flags, load_flags, problem_with, read_flags

SOURCE = """
CHOICES = ["a", "b"]
COMPUTED = list(range(3))

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--size", type=int, default=ServerArgs.size)
        parser.add_argument("--fraction", type=float)
        parser.add_argument("--on", action="store_true")
        parser.add_argument("--backend", choices=CHOICES)
        parser.add_argument("--level", type=int, choices=[1, 2])
        parser.add_argument("--computed", choices=COMPUTED)
        parser.add_argument("--sizes", type=int, nargs="+")
        parser.add_argument("--config", type=json.loads)
"""


def test_definitions_are_read_by_every_name() -> None:
    assert read_flags(SOURCE) == {
        "backend": Flag("backend", choices=("a", "b")),
        "computed": Flag("computed"),
        "config": Flag("config", type="json"),
        "fraction": Flag("fraction", type="float"),
        "level": Flag("level", type="int", choices=("1", "2")),
        "model": Flag("model"),
        "model-path": Flag("model-path"),
        "on": Flag("on", switch=True),
        "size": Flag("size", type="int"),
        "sizes": Flag("sizes", type="int", many=True),
    }


def test_values_are_checked_by_type_and_choice() -> None:
    flags = read_flags(SOURCE)
    right = [("size", 1), ("fraction", 1), ("fraction", 0.5), ("on", True), ("backend", "a"), ("level", 2),
             ("sizes", [1, 2]), ("config", "{}"), ("computed", "anything")]  # fmt: skip
    assert [problem_with(flags, name, value) for name, value in right] == [None] * len(right)
    wrong = [("size", "1"), ("size", True), ("size", 1.5), ("fraction", "x"), ("on", "yes"), ("backend", "c"),
             ("level", 3), ("sizes", 1), ("sizes", ["1"]), ("model", 7), ("nothing", 1)]  # fmt: skip
    assert all(problem_with(flags, name, value) for name, value in wrong)


def test_the_generated_file_reads_back(tmp_path: object) -> None:
    flags = read_flags(SOURCE)
    text = dump_flags("engine", "1.0", flags)
    assert text.count("\n") == len(flags) + 2  # one flag a line
    from pathlib import Path

    path = Path(str(tmp_path)) / "flags.json"
    path.write_text(text)
    assert load_flags(path) == flags


def test_the_pinned_engine_has_what_the_research_says() -> None:
    stack = load_catalogue().stacks["sglang-0.5.9-cu128"]
    flags = load_flags(flags_path(stack))
    for absent in ("disable-piecewise-cuda-graph", "enforce-piecewise-cuda-graph", "enable-pcie-oneshot-allreduce",
                   "cuda-graph-max-bs-decode"):  # fmt: skip
        assert absent not in flags
    assert flags["fp4-gemm-backend"].choices == ("auto", "flashinfer_cudnn", "flashinfer_cutlass", "flashinfer_trtllm")
    assert flags["tp-size"].type == flags["tensor-parallel-size"].type == "int"
