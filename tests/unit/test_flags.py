"""The engine's argument definitions, read without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright.catalogue import flags_path, load_catalogue
from gpuwright.flags import Flag, dump_flags, installed_proof, load_flags, problem_with, read_flags
from tests.make import catalogue

PARSERS = """
class Parsers:
    Map: dict = {"one": 1, "two": 2}
"""

SOURCE = """
from engine.parsers import Parsers
CHOICES = ["a", "b"]
MORE = CHOICES + ["c"]
COMPUTED = list(range(3))

class ServerArgs:
    ep_size: int = 1

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--size", type=int, default=ServerArgs.size)
        parser.add_argument("--fraction", type=float)
        parser.add_argument("--on", action="store_true")
        parser.add_argument("--either", action=argparse.BooleanOptionalAction)
        parser.add_argument("--backend", choices=CHOICES)
        parser.add_argument("--level", type=int, choices=[1, 2])
        parser.add_argument("--computed", choices=COMPUTED)
        parser.add_argument("--sizes", type=int, nargs="+")
        parser.add_argument("--config", type=json.loads)
        parser.add_argument("--more", choices=MORE)
        parser.add_argument("--tokens", type=human_readable_int)
        parser.add_argument("--parser", choices=list(Parsers.Map.keys()))
        parser.add_argument("--expert-size", "--ep-size", "--ep", type=int)
        parser.add_argument("--old", action=DeprecatedAction)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's package, installed in a folder."""
    folder = tmp_path_factory.mktemp("site") / "engine"
    (folder / "srt").mkdir(parents=True)
    (folder / "srt" / "server_args.py").write_text(SOURCE)
    (folder / "parsers.py").write_text(PARSERS)
    return folder


def test_definitions_are_read_by_every_name(package: Path) -> None:
    assert read_flags(package) == {
        "backend": Flag("backend", choices=("a", "b")),
        "computed": Flag("computed"),
        "config": Flag("config", type="json"),
        "either": Flag("either", switch=True),
        "ep": Flag("ep", type="int", same_as="ep-size"),
        "ep-size": Flag("ep-size", type="int"),
        "expert-size": Flag("expert-size", type="int", same_as="ep-size"),
        "fraction": Flag("fraction", type="float"),
        "level": Flag("level", type="int", choices=("1", "2")),
        "model": Flag("model", same_as="model-path"),
        "model-path": Flag("model-path"),
        "more": Flag("more", choices=("a", "b", "c")),
        "old": Flag("old", deprecated=True),
        "on": Flag("on", switch=True),
        "parser": Flag("parser", choices=("one", "two")),
        "size": Flag("size", type="int"),
        "sizes": Flag("sizes", type="int", many=True),
        "tokens": Flag("tokens", type="int"),
    }


def test_values_are_checked_by_type_and_choice(package: Path) -> None:
    flags = read_flags(package)
    right = [("size", 1), ("fraction", 1), ("fraction", 0.5), ("on", True), ("backend", "a"), ("level", 2),
             ("sizes", [1, 2]), ("config", "{}"), ("computed", "anything")]  # fmt: skip
    assert [problem_with(flags, name, value) for name, value in right] == [None] * len(right)
    wrong = [("size", "1"), ("size", True), ("size", 1.5), ("fraction", "x"), ("on", "yes"), ("backend", "c"),
             ("level", 3), ("sizes", 1), ("sizes", ["1"]), ("model-path", 7), ("nothing", 1),
             ("ep", 1), ("expert-size", 1), ("old", "x"), ("sizes", []), ("parser", "three")]  # fmt: skip
    assert all(problem_with(flags, name, value) for name, value in wrong)


def test_what_is_installed_is_held_against_what_is_recorded(package: Path) -> None:
    flags = read_flags(package)

    def proof(recorded: dict[str, Flag]) -> subprocess.CompletedProcess[str]:
        code = installed_proof("engine", recorded, "files/flags/engine.json")
        env = {"PYTHONPATH": str(package.parent)}
        return subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, env=env)

    (package / "__init__.py").write_text("raise ImportError('the engine is not imported')")
    assert proof(flags).returncode == 0
    other = proof(flags | {"size": Flag("size", type="str"), "gone": Flag("gone")})
    assert other.returncode == 1 and "other arguments than files/flags/engine.json: --gone, --size" in other.stderr


def test_the_generated_file_reads_back(tmp_path: Path, package: Path) -> None:
    flags = read_flags(package)
    text = dump_flags("engine", "1.0", flags)
    assert text.count("\n") == len(flags) + 2  # one flag a line
    path = tmp_path / "flags.json"
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
    assert flags["ep"].same_as == flags["expert-parallel-size"].same_as == "ep-size" and not flags["ep-size"].same_as
    assert "glm45" in flags["reasoning-parser"].choices and "glm47" in flags["tool-call-parser"].choices


def test_the_newer_engine_has_other_arguments() -> None:
    flags = catalogue().flags["sglang-0.5.12-cu130"]
    assert flags["disable-piecewise-cuda-graph"].switch and flags["enforce-piecewise-cuda-graph"].switch
    assert flags["enable-piecewise-cuda-graph"].deprecated, "they are on by default"
    assert flags["max-total-tokens"].type == "int" and "flashinfer_cutedsl" in flags["fp4-gemm-backend"].choices
