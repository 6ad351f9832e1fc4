"""Bad input: each names file, line and key, and what to do, before any host is asked anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuwright.catalogue import CATALOG, PATCHES, load_catalogue
from gpuwright.errors import InputErrors, nearest
from gpuwright.hostdata import Sources, read_host_data
from gpuwright.spec import build_spec
from tests.make import catalogue, gpu_spec, group_data, lab_spec


def edited(tmp_path: Path, file: str, old: str, new: str) -> str:
    """What loading the catalogue says once `old` is replaced by `new` in a copy of `file`."""
    catalog, patches = tmp_path / "catalog", tmp_path / "patches"
    shutil.copytree(CATALOG, catalog)
    shutil.copytree(PATCHES, patches)
    path = tmp_path / file
    text = path.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in {file}"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputErrors) as caught:
        load_catalogue(catalog, patches)
    return str(caught.value)


TIERS, STACK = "catalog/tiers/sglang-0.5.9-cu128.yaml", "catalog/stacks/sglang-0.5.9-cu128.yaml"
SERIES = "patches/series.yaml"
RULES, SIGNATURES = "catalog/rules.yaml", "catalog/signatures.yaml"


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (TIERS, "ep-size: 8}", "ep-size: eight}", "args.ep-size: expects a whole number; found 'eight'"),
        (TIERS, "ep-size: 8}", "ep-size: true}", "args.ep-size: expects a whole number; found True"),
        (TIERS, "mem-fraction-static: 0.85", "mem-fraction-static: high", "expects a number; found 'high'"),
        (TIERS, "quantization: modelopt_fp4", "quantization: 4", "args.quantization: expects text; found 4"),
        (TIERS, "enable-metrics: true", "enable-metrics: 1", "is a switch: write `enable-metrics: true`"),
        (TIERS, "enable-metrics: true", "enable-metrics: false", "or leave it out; found False"),
        (TIERS, "enable-metrics", "enable-metrix", 'no such flag\n    did you mean "enable-metrics"?'),
        (TIERS, "modelopt_fp4", "modelopt_fp5", "'modelopt_fp5' is not a choice"),
        (TIERS, "ep-size: 8}", "ep-size: [8]}", "expects one value (a whole number); found [8]"),
        (TIERS, "ep-size: 8}", "port: 8}", "is rendered by gpuwright itself\n    set `port` in group_data instead"),
        (TIERS, "ep-size: 8}", "tp-size: 8}", "set `tp` in the ladder instead"),
        (TIERS, "ep-size: 8}", "node-rank: 1}", "set `cluster` in group_data instead"),
        (TIERS, "ep-size: 8}", "api-key: x}", "set `secrets` in group_data (an argument is seen in every"),
        (TIERS, "SGLANG_MSCCLPP_MAX_BYTES: 2MB", "HF_TOKEN: x", "env.HF_TOKEN: has the name of a secret"),
        (TIERS, "SGLANG_MSCCLPP_MAX_BYTES: 2MB", "PATH: /bin", "set `cuda_home` in group_data instead"),
        (TIERS, "SGLANG_MSCCLPP_MAX_BYTES: 2MB", "FLASHINFER_CUDA_ARCH_LIST: 12.0a", "so a tier cannot set it"),
        (TIERS, "extends: [piecewise, ep8]", "extends: [piecwise, ep8]", 'there is no tier "piecwise" above'),
        (TIERS, "needs: {world_sizes: [8]}", "needs: {world_sizes: [16]}", "needs 16 GPUs; the ladder has 8"),
        (TIERS, "status: blocked", "status: stuck", "should be 'open', 'works', 'blocked' or 'rejected'"),
        (TIERS, "        args: {ep-size: 8}", "        status: works", "status: works needs `evidence`: what was seen"),
        (TIERS, "        args: {ep-size: 8}", "        waive: {ep-sise: x}", 'there is no rule "ep-sise"'),
        (TIERS, "        args: {ep-size: 8}", "        args: {ep-size: 4}", "breaks the rule ep-size: ep-size must"),
        (TIERS, "    nodes: 2", "    nodes: 3", "16 GPUs cannot be shared equally by 3 nodes"),
        (TIERS, "patch_set: none", "patch_set: latest", "evidence[0].patch_set"),
        (RULES, "args.ep_size in [1, tp]", "args.ep_size in [1, tp", "require: is not an expression"),
        (SIGNATURES, "prevented_by: [lock]", "prevented_by: [luck]", '"luck" is nothing that prevents'),
        (SIGNATURES, "pattern: 'Driver/library", "pattern: '(Driver/library", "is not a regular expression"),
        (SERIES, "distribution: flashinfer-python", "distribution: flashinfer_python", "write flashinfer-python"),
        (TIERS, "rank:", "rnak:", 'rnak: there is no such key\n    did you mean "rank"?'),
        (TIERS, "name: fp4-cudnn", "name: baseline", '"baseline" is used twice in this ladder'),
        (TIERS, "[flashinfer-cuda-version-from-torch,", "[flashinfer,", 'no patch "flashinfer" in the series'),
        (TIERS, "SAFETENSORS_FAST_GPU: \"1\"", "SAFETENSORS_FAST_GPU: 1", "should be text (in quotes"),
        (TIERS, "    tp: 8", "    tp: 8\n    tp: 4", "tp: is written twice in one mapping"),
        (TIERS, "    tp: 8", "    tp: [8", "YAML: "),
        (TIERS, '["Capture piecewise CUDA graph end"]', '["("]', "is not a regular expression"),
        (STACK, "name: sglang-0.5.9-cu128", "name: other", 'is "other", but the file is named sglang-0.5.9-cu128.yaml'),
        (STACK, "- sglang==0.5.9", "- sglang==", "is not a requirement"),
        (STACK, "    why: sglang", "    reason: sglang", "overrides[0].why: is missing"),
        (SERIES, "pre_sha256: 1", "pre_sha256: X", "patches[0].pre_sha256: "),
        (SERIES, "versions: ==0.6.3", "versions: 0.6.3", "is not a version specifier, such as ==0.6.3"),
        (SERIES, "diff: flash", "diff: trash", "trashinfer-cuda-version-from-torch.diff is not in"),
        (SERIES, "status: active", "status: rejected", "evidence: is missing: a rejected patch is kept for"),
        (SERIES, "text: torch is built", "txet: torch is built", "assumptions[0].txet: there is no such key"),
        (SERIES, "ladders: [glm5-nvfp4,", "ladders: [glm5,", 'there is no ladder "glm5"'),
        (SERIES, "value: -DCUTLASS", "value: -DUTLASS", "does not set FLASHINFER_EXTRA_CUDAFLAGS=-DUTLASS"),
        (SERIES, "versions: <0.6.8", "versions: 0.6.8", "is not a version specifier, such as ==0.6.3"),
        (SERIES, "forwarded: false", "forwarded: no thanks", "forwarded: should be true or false"),
    ],
)  # fmt: skip
def test_a_bad_catalogue_names_file_line_and_key(tmp_path: Path, file: str, old: str, new: str, expected: str) -> None:
    line = next(
        i for i, text in enumerate((PATCHES.parent.parent / relative(file)).read_text().splitlines(), 1) if old in text
    )
    message = edited(tmp_path, file, old, new)
    assert expected in message
    assert f"{tmp_path / file}:" in message
    numbers = [
        int(row.removeprefix(f"{tmp_path / file}:").split(":")[0]) for row in message.splitlines() if row[0] != " "
    ]
    assert any(abs(number - line) <= 2 for number in numbers), (numbers, line)


def relative(file: str) -> str:
    return file.replace("patches/", "files/patches/") if file.startswith("patches/") else file


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    message = edited(
        tmp_path, TIERS, "trust-remote-code: true\n      quantization: modelopt_fp4", "quantization: x\n      trust: 1"
    )
    assert "quantization: 'x' is not a choice" in message and "trust: the pinned engine has no such flag" in message


ENTRY = """\
  - id: {id}
    status: active
    distribution: flashinfer-python
    versions: "{versions}"
    file: flashinfer/jit/cpp_ext.py
    diff: flashinfer-cuda-version-from-torch.diff
    pre_sha256: {pre}
    post_sha256: {post}
    probe: flashinfer-gdc.probe.py
    why: x
    upstream: https://example.org
    forwarded: false
    remove_when: x
"""
HEAD = next(patch.post_sha256 for patch in catalogue().patches if patch.file == "flashinfer/jit/cpp_ext.py")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("second", HEAD, "==0.6.3")], None),
        ([("second", "e" * 64, "==0.6.3")], "cpp_ext.py (stack sglang-0.5.9-cu128)"),
        ([("second", "e" * 64, "==0.6.11.post1")], None),  # another file, of which it is the first patch
        (
            [("second", "e" * 64, ">=0.6.3")],
            "is not the post-image of flashinfer-cuda-version-from-torch, the patch before",
        ),
        ([("second", "e" * 64, "==0.6.11.post1"), ("third", HEAD, "==0.6.3")], None),
        (
            [("second", "e" * 64, "==0.6.11.post1"), ("third", HEAD, ">=0.6.3")],
            "the patch before it on flashinfer/jit/",
        ),
        ([("flashinfer-cuda-version-from-torch", "e" * 64, "==0.6.11.post1")], None),  # the same change, later
        ([("flashinfer-cuda-version-from-torch", HEAD, "==0.6.3")], "is used twice for flashinfer-python 0.6.3"),
    ],
)
def test_the_patches_of_one_file_form_a_chain_on_every_stack(
    tmp_path: Path, entries: list[tuple[str, str, str]], said: str | None
) -> None:
    patches = tmp_path / "patches"
    shutil.copytree(PATCHES, patches)
    path = patches / "series.yaml"
    rows = [ENTRY.format(id=name, pre=pre, post="f" * 64, versions=versions) for name, pre, versions in entries]
    before, settings = path.read_text().split("\n# Changes of behaviour that need no patch")
    path.write_text("\n".join([before, *rows, "# Changes of behaviour that need no patch" + settings]))
    if said is None:
        assert len(load_catalogue(patches=patches).patches) == len(catalogue().patches) + len(entries)
    else:
        with pytest.raises(InputErrors) as caught:
            load_catalogue(patches=patches)
        assert said in str(caught.value) and f"patches[{len(catalogue().patches) + len(entries) - 1}]" in str(
            caught.value
        )


def test_a_setting_is_asked_for_on_the_stacks_whose_version_needs_it(tmp_path: Path) -> None:
    message = edited(tmp_path, SERIES, "versions: <0.6.8", "versions: <0.7")
    assert "ladder glm5-nvfp4 of stack sglang-0.5.12-cu130 does not set FLASHINFER_EXTRA_CUDAFLAGS" in message
    assert "sglang-0.5.9" not in message


def test_an_empty_and_a_missing_file(tmp_path: Path) -> None:
    shutil.copytree(CATALOG, tmp_path / "catalog")
    tiers = tmp_path / "catalog" / "tiers" / "sources-only.yaml"
    text = tiers.read_text()
    tiers.write_text("")
    with pytest.raises(InputErrors, match=r"tiers/sources-only\.yaml: file: is empty"):
        load_catalogue(tmp_path / "catalog", PATCHES)
    tiers.rename(tiers.with_stem("sources-onyl"))
    with pytest.raises(InputErrors, match=r"tiers/sources-only\.yaml: file: cannot be read: No such file"):
        load_catalogue(tmp_path / "catalog", PATCHES)
    tiers.write_text(text)
    (tiers.with_stem("sources-onyl")).write_text(text)
    with pytest.raises(InputErrors, match=r'no stack "sources-onyl"\n    did you mean "sources-only"'):
        load_catalogue(tmp_path / "catalog", PATCHES)


GROUP = '''"""A group."""

port = 31000
model = {
    "kind": "tiny",
    "layers": 2,
}
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("port = 31000", 'port = "thirty"', "group.py:3: port: should be a whole number; found 'thirty'"),
        ("port = 31000", "port = 70000", "group.py:3: port: should be less than or equal to 65535; found 70000"),
        ("port = 31000", "prot = 31000", 'group.py:3: prot: there is no such key\n    did you mean "port"?'),
        ('"layers": 2', '"layers": "two"', "group.py:6: model.layers: should be a whole number; found 'two'"),
        ('"layers": 2', '"layer": 2', 'group.py:6: model.layer: there is no such key\n    did you mean "layers"?'),
        ('"kind": "tiny"', '"kind": "huge"', "group.py:4: model: "),
        ("port = 31000", "root = 'here'", "group.py:3: root: is not an absolute path; found 'here'"),
        ("port = 31000", "root = '/a;b'", "which PATH or supervisor's file cannot carry"),
        ("port = 31000", "stages = ['runtim']", "group.py:3: stages[0]: should be 'preflight', 'system'"),
        ("port = 31000", "tier = 'basline'", 'ladder lab-cpu has no tier "basline"\n    did you mean "baseline"?'),
        ("port = 31000", "stack = 'sglang'", 'group.py:3: stack: there is no stack "sglang"'),
        ("port = 31000", "ladder = 'lab'", 'cu128 has no ladder "lab"\n    did you mean "lab-cpu"?'),
        ("port = 31000", "python = '3.9'", 'group.py:3: python: Python "3.9" has no lock'),
    ],
)  # fmt: skip
def test_bad_group_data_names_file_line_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "group.py"
    text = GROUP.replace(old, new)
    path.write_text(text)
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    values = {k: v for k, v in namespace.items() if not k.startswith("__")}
    data = group_data("all", "lab") | {"python": "3.12", "interpreter": None} | values
    with pytest.raises(InputErrors) as caught:
        build_spec("@local", data, catalogue(), Sources((), [path]))
    assert expected in str(caught.value)


def test_data_given_on_the_command_line_is_named_so() -> None:
    data = group_data("all", "lab") | {"port": "abc"}
    with pytest.raises(InputErrors, match=r"^--data: port: should be a whole number; found 'abc'$"):
        read_host_data(data, Sources({"port"}, []))


def test_a_secret_that_was_pasted_is_not_printed() -> None:
    with pytest.raises(InputErrors) as caught:
        lab_spec(secrets={"api-key": "sk-live-123456"})
    assert "secrets.api-key: is not env:NAME or file:PATH" in str(caught.value) and "sk-live" not in str(caught.value)


def test_links_into_uvs_cache_are_refused() -> None:
    with pytest.raises(InputErrors, match="UV_LINK_MODE=symlink would have every patch written into uv's cache"):
        lab_spec(installer_env={"UV_LINK_MODE": "symlink"})


def test_keys_need_the_patches_that_keep_them_to_themselves() -> None:
    with pytest.raises(InputErrors, match="API keys need the patches sglang-keys-out-of-the-log and sglang-keys-out"):
        lab_spec(secrets={"api-key": "env:X"}, patches="none")


def test_a_python_that_became_a_number_is_explained() -> None:
    with pytest.raises(InputErrors, match=r"arrives as the number 3\.1\n"):
        lab_spec(python=3.10)


def test_a_tier_whose_patches_are_left_out_is_refused() -> None:
    with pytest.raises(InputErrors, match="tier piecewise needs flashinfer-cuda-version-from-torch, flashinfer-fp4"):
        gpu_spec(tier="piecewise", patches="none")


def test_the_server_is_asked_where_it_listens() -> None:
    assert lab_spec().address == lab_spec(bind="0.0.0.0").address == "127.0.0.1"
    assert lab_spec(bind="10.0.0.5").address == "10.0.0.5"


def test_stages_may_be_written_with_commas() -> None:
    assert lab_spec(stages="patches, runtime").stages == ["runtime", "patches"]


def test_the_nearest_name_prefers_swapped_letters() -> None:
    assert nearest("prot", ["root", "port", "bind"]) == 'did you mean "port"?'
    assert nearest("zzz", ["b", "a"]) == "there is: a, b"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"profile": "ful"}, '--data: profile: there is no profile "ful"\n    did you mean "full"?'),
        ({"gate": "basline"}, '--data: gate: ladder lab-cpu has no tier "basline"\n    did you mean "baseline"?'),
        (
            {"gate": "baseline", "smoke": "never"},
            "--data: gate: a gate judges the benchmark, which this run leaves out",
        ),
        (
            {"gate": "baseline", "stages": "runtime"},
            "--data: gate: a gate judges the benchmark, which this run leaves out",
        ),
    ],
)
def test_what_is_measured_and_judged_is_checked_before_any_host_is_touched(data: dict[str, str], said: str) -> None:
    values = group_data("all", "lab") | data
    with pytest.raises(InputErrors) as error:
        build_spec("@local", values, catalogue(), Sources(data, []))
    assert str(error.value).startswith(said)
