"""When kernels are shared, by whom, and what of somebody's own settings stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config

from phalanx.config import Job, job_from_table, resolve
from phalanx.train.kernels import sharing, workspace
from phalanx.train.kernels.sharing import VARIABLES, KernelSharing, kernel_sharing, store_root


@pytest.fixture(autouse=True)
def fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sharing, "_open", None)
    monkeypatch.setattr(workspace, "PLACES", [lambda: str(tmp_path)])
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    with config.patch(cpp_cache_precompile_headers=True):
        yield


def make_job(folder: Path, **train: Any) -> Job:
    table = {"runs": str(folder / "runs"), "train": {"compile": "on", "device": "cpu", **train}}
    return resolve(job_from_table(table), 1)


def mesh(device: str = "cpu", **coordinates: int) -> Any:
    places = {"pipeline": 0, "replicate": 0, "shard": 0, "context": 0, "tensor": 0}
    return SimpleNamespace(device=torch.device(device), coordinates={**places, **coordinates})


def begun(job: Job, **coordinates: int) -> KernelSharing:
    found = KernelSharing(job, mesh(**coordinates))
    found.begin(RUN)
    return found


RUN: Any = SimpleNamespace(step=0, first_step=1)
OUTCOME: Any = None


def bundles(job: Job) -> list[Path]:
    return list(store_root(job).glob("*/*.tar.gz"))


def compile_(name: str) -> None:
    Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], name).write_bytes(b"code")


def test_what_the_first_steps_compile_is_kept_before_the_run_ends(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    callback = begun(job)
    compile_("a.so")
    for step in (101, 102):  # of a run that goes on from step 100
        callback.after_step(SimpleNamespace(step=step, first_step=101), OUTCOME)  # type: ignore[arg-type]
        assert bundles(job) == []
    callback.after_step(SimpleNamespace(step=103, first_step=101), OUTCOME)  # type: ignore[arg-type]
    callback._join()
    assert len(bundles(job)) == 1
    compile_("b.so")
    callback.end(RUN, None)
    assert len(bundles(job)) == 2


def test_compilers_use_the_folder_and_triton_its_own_part(tmp_path: Path) -> None:
    begun(make_job(tmp_path))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_kernels_are_not_named_by_headers_that_lie_on_this_node(tmp_path: Path) -> None:
    begun(make_job(tmp_path))
    assert not config.cpp_cache_precompile_headers


@pytest.mark.parametrize(
    ("coordinates", "shares"),
    [({}, True), ({"pipeline": 1}, True), ({"shard": 1}, False), ({"tensor": 1}, False)],
)
def test_one_rank_of_a_stage_shares(
    tmp_path: Path, coordinates: dict[str, int], shares: bool
) -> None:
    job = make_job(tmp_path)
    callback = begun(job, **coordinates)
    compile_("a.so")
    callback.end(RUN, None)
    assert len(bundles(job)) == shares


def test_a_run_that_failed_keeps_nothing_at_its_end(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    callback = begun(job)
    compile_("a.so")
    callback.end(RUN, RuntimeError("kernels may be why"))
    assert bundles(job) == []


def test_a_run_attaches_it_that_compiles_and_keeps_something(tmp_path: Path) -> None:
    def attached(device: str = "cpu", **train: str) -> bool:
        return bool(kernel_sharing(make_job(tmp_path, **train), mesh(device)))

    assert attached() and attached("cuda", compile="off")
    assert not attached(compile="off") and not attached("cuda", kernel_cache="off")


def test_somebodys_own_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    begun(make_job(tmp_path)).end(RUN, None)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine" and list(tmp_path.iterdir()) == []


def test_torchs_usual_folder_is_nobodys_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    begun(make_job(tmp_path))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_a_store_that_others_can_write_costs_warmth_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path)
    store_root(job).mkdir(parents=True)
    store_root(job).chmod(0o777)
    callback = begun(job)
    callback.end(RUN, None)
    assert "compiled anew" in caplog.text and "chmod go-w" in caplog.text
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_full_disk_under_the_store_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    callback = begun(make_job(tmp_path))
    compile_("a.so")
    monkeypatch.setattr(os, "fsync", full)
    callback.end(RUN, None)
    assert "No space left" in caplog.text


def test_a_folder_of_ones_own_may_name_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert store_root(make_job(tmp_path, kernel_cache="$SCRATCH/k")) == tmp_path / "k"
