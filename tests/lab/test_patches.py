"""The patch series on the real venv: the chain of failures it ends, revert, foreign files, integrity, two at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.catalogue import PATCHES, load_catalogue
from gpuwright.errors import GpuwrightError
from gpuwright.lockfile import lock_path, read_lock
from gpuwright.patches import exact_applier, read_diff
from gpuwright.series import NewPatch, Wheels, check, make
from tests.lab.conftest import PYINFRA, Lab, ok, sha256
from tests.make import catalogue

STACK = "sglang-0.5.9-cu128"
LOCK = read_lock(lock_path(catalogue().stacks[STACK], "3.12")).versions
# The series as far as it is made for the lab's stack.
SERIES = tuple(patch for patch in catalogue().patches if patch.covers(LOCK.get(patch.distribution)))
FIRST, OPAQUE, REJECTED, *KEYS = SERIES
OURS = replace(catalogue(), patches=SERIES)
FILES = {patch.file: patch for patch in (FIRST, OPAQUE, *KEYS)}
FLASHINFER = [patch.file for patch in (FIRST, OPAQUE)]
PROBE = (PATCHES / OPAQUE.probe).read_text()
STAGES = ("--data", "stages=preflight,system,runtime,patches")


@pytest.fixture(scope="module")
def node(lab: Lab) -> Lab:
    ok(lab.deploy(*STAGES))
    return lab


def overlay(node: Lab, folder: Path, contents: dict[str, bytes]) -> Path:
    """A folder for PYTHONPATH in which flashinfer is the installed one, but for the files given."""

    def link(source: Path, target: Path, inside: str) -> None:
        target.mkdir()
        for entry in source.iterdir():
            path = f"{inside}/{entry.name}"
            if path in contents:
                (target / entry.name).write_bytes(contents[path])
            elif entry.is_dir() and any(name.startswith(path + "/") for name in contents):
                link(entry, target / entry.name, path)
            else:
                (target / entry.name).symlink_to(entry)

    link(node.site / "flashinfer", folder / "flashinfer", "flashinfer")
    return folder


def pristine(node: Lab, file: str) -> bytes:
    return (node.root / "patches" / "originals" / FILES[file].pre_sha256).read_bytes()


def content_after(node: Lab, *ids: str) -> dict[str, bytes]:
    contents = {file: pristine(node, file) for file in FLASHINFER}
    for patch in (FIRST, OPAQUE, REJECTED):
        if patch.id in ids:
            contents[patch.file] = exact_applier()(contents[patch.file], read_diff(patch).encode())
    return contents


@pytest.mark.parametrize(
    ("ids", "failure"),
    [
        ((), ("Attempted to call function marked as skipped", "allocate_lock", "get_cuda_path")),
        ((FIRST.id,), ("Attempted to call function marked as skipped", "datetime.now", "register")),
        ((FIRST.id, REJECTED.id), ("Skip calling `torch.compiler.disable()`d function", "fp4_quantize")),
        ((FIRST.id, OPAQUE.id), ()),
    ],
    ids=["pristine", "first patch", "rejected patch", "series"],
)
def test_each_patch_moves_the_failure_on_until_the_series_ends_it(
    node: Lab, tmp_path: Path, ids: tuple[str, ...], failure: tuple[str, ...]
) -> None:
    """The real ModelOptFp4LinearMethod.apply under fullgraph for SM120, over fake tensors: the probe of the series."""
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LD_LIBRARY_PATH": str(node.root / "lib"),
        "PYTHONPATH": str(overlay(node, tmp_path, content_after(node, *ids))),
    }  # fmt: skip
    done = subprocess.run([node.venv / "bin" / "python", "-"], input=PROBE, capture_output=True, text=True, env=env)
    if failure:
        assert done.returncode != 0 and "torch._dynamo.exc.Unsupported" in done.stderr
        for part in failure:
            assert part in done.stderr, done.stderr[-3000:]
    else:
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_gdc_flag_reaches_the_ninja_files_only_when_it_is_set(node: Lab, tmp_path: Path) -> None:
    (setting,) = catalogue().settings
    code = (PATCHES / setting.probe).read_text()
    for value, expected in (("", 1), (setting.value, 0)):
        env = {
            "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LD_LIBRARY_PATH": str(node.root / "lib"),
            setting.name: value, "FLASHINFER_WORKSPACE_BASE": str(tmp_path / f"w{expected}"),
        }  # fmt: skip
        done = subprocess.run(
            [node.venv / "bin" / "python", "-I", "-"], input=code, capture_output=True, text=True, env=env
        )
        assert done.returncode == expected, done.stderr[-2000:]


def test_every_diff_makes_its_post_image_from_the_pinned_wheel() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuwright", "patches"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as recorded") == len(catalogue().patches) and "PROBLEM" not in done.stdout


def wheels(node: Lab, folder: Path) -> Wheels:
    """The pinned wheel's files, as kept on the node: no index is asked."""
    for file, patch in FILES.items():
        target = folder / f"{patch.distribution}-{patch.versions.removeprefix('==')}" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(pristine(node, file))
    return Wheels(Path("/nonexistent/uv"), catalogue(), folder)


def test_a_diff_that_no_longer_fits_its_wheel_is_a_problem(node: Lab, tmp_path: Path) -> None:
    source = wheels(node, tmp_path)
    assert not any(row.problem for row in check(OURS, source, offline=False))
    file = tmp_path / "flashinfer-python-0.6.3" / FIRST.file
    file.write_bytes(file.read_bytes() + b"\n")
    rows = {row.patch.id: row for row in check(OURS, source, offline=False)}
    assert rows[FIRST.id].problem and "pre-image is" in rows[FIRST.id].wheel and not rows[OPAQUE.id].problem


def test_a_new_patch_is_made_from_an_edited_copy(node: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(PATCHES, folder)
    source = wheels(node, tmp_path)
    edited = tmp_path / "edited.py"
    edited.write_bytes((node.site / FIRST.file).read_bytes() + b"\n# added\n")
    new = NewPatch("trial", "flashinfer-python", FIRST.file, edited, "to try", "https://example.org/1", "tried", STACK)
    made = make(new, catalogue(), source, folder)
    assert [path.name for path in made] == ["trial.diff", "trial.probe.py", "series.yaml"]
    patch = load_catalogue(patches=folder).patches[-1]
    assert patch.id == "trial" and patch.pre_sha256 == FIRST.post_sha256, "it chains on the patch before it"
    assert patch.post_sha256 == sha256(edited) and patch.versions == "==0.6.3"
    before, after = (PATCHES / "series.yaml").read_text(), (folder / "series.yaml").read_text()
    assert [line for line in before.splitlines() if line not in after.splitlines()] == [], "nothing else was touched"
    with pytest.raises(GpuwrightError, match='"fp4-quantize-compiler-disable" is taken'):
        make(NewPatch(REJECTED.id, *list(vars(new).values())[1:]), catalogue(), source, folder)
    edited.write_bytes((node.site / FIRST.file).read_bytes())
    with pytest.raises(GpuwrightError, match="does not differ"):
        make(new, catalogue(), source, folder)
    pinned = (
        "pinned at .*0.6.11.post1 by sglang-0.5.12-cu130, 0.6.3 by sglang-0.5.9-cu128, .*: say for which, with --stack"
    )
    with pytest.raises(GpuwrightError, match=pinned):
        make(replace(new, stack=None), catalogue(), source, folder)


def states(node: Lab) -> dict[str, str]:
    return {file: sha256(node.site / file) for file in FILES}


PRISTINE = {file: patch.pre_sha256 for file, patch in FILES.items()}
PATCHED = {file: patch.post_sha256 for file, patch in FILES.items()}


def test_without_patches_the_venv_is_as_the_wheels_are_and_back_again(node: Lab) -> None:
    assert states(node) == PATCHED
    assert ok(node.deploy(*STAGES, "--data", "patches=none")).changed == [p.APPLY]
    assert states(node) == PRISTINE
    for patch in KEYS:
        assert "AssertionError: an API key is in the" in node.python((PATCHES / patch.probe).read_text()).stderr
    assert ok(node.deploy(*STAGES, "--data", "patches=none")).changed == []
    assert ok(node.deploy(*STAGES)).changed == [p.APPLY, p.PROBE]
    assert states(node) == PATCHED


def test_a_foreign_file_is_replaced_when_asked_for_and_a_copy_kept(node: Lab) -> None:
    target = node.site / OPAQUE.file
    edited = target.read_bytes().replace(b"import torch\n", b"import torch  # edited\n", 1)
    target.write_bytes(edited)
    run = node.deploy(*STAGES)
    assert run.code == 1 and "+import torch  # edited" in run.said
    assert ok(node.deploy(*STAGES, "--data", "patches_foreign=replace")).changed == [p.APPLY, p.PROBE]
    assert states(node) == PATCHED
    copies = [path.read_bytes() for path in (node.root / "patches" / "foreign").iterdir()]
    assert edited in copies
    assert ok(node.deploy(*STAGES)).changed == []


def edit_in_place(path: Path, data: bytes) -> None:
    """Edit a file without writing through the hard link that uv's cache holds."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def test_a_hand_edit_of_the_same_size_anywhere_is_found_named_and_mended(node: Lab) -> None:
    target = node.site / "sglang" / "srt" / "managers" / "scheduler.py"
    good = target.read_bytes()
    edit_in_place(target, good.replace(b"import signal", b"import signaL", 1))
    assert target.read_bytes() != good
    run = ok(node.deploy(*STAGES))
    assert "sglang/srt/managers/scheduler.py has another content than recorded" in run.said
    assert run.changed == [p.SYNC, p.VERIFY, p.APPLY, p.PROBE], "its distribution carries a patch, which comes back"
    assert target.read_bytes() == good and states(node) == PATCHED, "the declared patches are no damage"


def test_deep_finds_a_changed_byte_in_a_library_and_a_second_run_is_quick(node: Lab) -> None:
    target = next(path for path in (node.site / "msgspec").glob("*.so"))
    good = target.read_bytes()
    edit_in_place(target, good[:-1] + bytes([good[-1] ^ 1]))
    assert ok(node.deploy(*STAGES)).changed == [], "text alone does not look into libraries"
    begin = time.monotonic()
    run = ok(node.deploy(*STAGES, "--data", "integrity=deep", "--dry"))
    first = time.monotonic() - begin
    assert run.planned[:1] == [p.SYNC] and f"msgspec/{target.name} has another content than recorded" in run.said
    begin = time.monotonic()
    assert ok(node.deploy(*STAGES, "--data", "integrity=deep")).changed == [p.SYNC, p.VERIFY]
    assert target.read_bytes() == good
    print(f"deep: first {first:.1f} s, repair and read again {time.monotonic() - begin:.1f} s")


def test_two_deploys_at_once_patch_once_and_both_end_well(node: Lab) -> None:
    for file in FILES:
        edit_in_place(node.site / file, pristine(node, file))
    command = node.command("deploy.py", "-y", *STAGES)
    assert command[0] == PYINFRA
    started = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert states(node) == PATCHED
    assert ok(node.deploy(*STAGES)).changed == []


def test_uvs_cache_is_pristine_after_all_that(node: Lab) -> None:
    uv = node.root / "tools" / "bin" / "uv"
    cache = Path(subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip())
    for file, patch in FILES.items():
        cached = {sha256(path) for path in cache.glob(f"archive-v*/*/{file}")}  # of another version, too
        assert patch.pre_sha256 in cached, file
        assert cached.isdisjoint(each.post_sha256 for each in catalogue().patches), file
