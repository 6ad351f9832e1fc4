"""The digests: each changes with what it stands for, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

from gpuwright.spec import NodeSpec
from tests.make import gpu_spec, lab_spec


def digests(spec: NodeSpec) -> tuple[str, str, str]:
    return spec.patch_set_digest, spec.runtime_digest, spec.spec_digest


BASE = gpu_spec()


def changed(other: NodeSpec) -> list[bool]:
    return [a != b for a, b in zip(digests(BASE), digests(other), strict=True)]


def test_nothing_changed() -> None:
    assert changed(gpu_spec()) == [False, False, False]


def test_a_tier_changes_the_spec_alone() -> None:
    assert changed(gpu_spec(tier="ep8")) == [False, False, True]


def test_a_port_and_a_model_change_the_spec_alone() -> None:
    assert changed(gpu_spec(port=30001)) == [False, False, True]
    assert changed(gpu_spec(model={"kind": "folder", "path": "/models/other"})) == [False, False, True]


def test_how_it_is_measured_changes_the_benchmark_digest_alone() -> None:
    full = gpu_spec(profile="full")
    assert changed(full) == [False, False, False] and full.benchmark_digest != BASE.benchmark_digest
    noisy = {"smoke": {**BASE.data.profiles["smoke"].model_dump(), "noise": 0.5}}
    assert gpu_spec(profiles=noisy).benchmark_digest == BASE.benchmark_digest, "how it is judged is no load"


def test_a_patch_changes_all() -> None:
    patch = BASE.patches[0].model_copy(update={"post_sha256": "0" * 64})
    assert changed(replace(BASE, patches=(patch,))) == [True, True, True]
    assert changed(replace(BASE, patches=())) == [True, True, True]


def test_a_compiler_flag_changes_the_runtime() -> None:
    ladder = BASE.ladder.model_copy(update={"env": BASE.ladder.env | {"FLASHINFER_EXTRA_CUDAFLAGS": "-DX"}})
    assert changed(replace(BASE, ladder=ladder)) == [False, True, True]


def test_other_environment_does_not_change_the_runtime() -> None:
    ladder = BASE.ladder.model_copy(update={"env": BASE.ladder.env | {"NCCL_P2P_LEVEL": "PHB"}})
    assert changed(replace(BASE, ladder=ladder)) == [False, False, True]


def test_python_and_lock_and_toolkit_change_the_runtime() -> None:
    assert changed(gpu_spec(python="3.11")) == [False, True, True]
    assert changed(gpu_spec(cuda_home="/usr/local/cuda-12.9")) == [False, True, True]


def test_what_runs_the_deploy_changes_nothing() -> None:
    assert changed(gpu_spec(stages=["runtime"], smoke="never", ready_timeout_s=99)) == [False, False, False]


def test_the_caches_of_two_patch_sets_are_two_folders() -> None:
    without = replace(BASE, patches=())
    assert BASE.cache != without.cache
    assert f"FLASHINFER_WORKSPACE_BASE={BASE.cache}/flashinfer" in BASE.active_script.text
    assert BASE.cache not in without.active_script.text


def test_only_a_node_without_a_gpu_gets_the_libcuda_stand_in() -> None:
    assert "LD_LIBRARY_PATH" in lab_spec().environment(lab_spec().tier)
    assert "LD_LIBRARY_PATH" not in BASE.environment(BASE.tier)
    assert BASE.cuda_stub_source is None
