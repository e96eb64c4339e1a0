"""Published runs: what a row means, what is skipped and why, and how well it is predicted."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import PRESETS
from phalanx.plan.cost.constants import constants_toml, read_constants, shipped
from phalanx.plan.evidence.calibrate import calibrate_runs
from phalanx.plan.evidence.check import check_runs
from phalanx.plan.evidence.fit import CalibrationFit, Knob, prior_constants
from phalanx.plan.evidence.published import PublishedRun, parse_runs, read_table
from phalanx.plan.evidence.replay import Replay

ROW = {
    "source": "a new paper",
    "model": "Llama-3-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq": "8192",
    "gpu": "H100-80G-SXM",
    "num_gpus": "64",
    "tp": "1",
    "pp": "1",
    "dp": "64",
    "cp": "1",
    "zero_fsdp": "FSDP",
    "microbatch": "1",
    "global_batch": "128",
    "precision": "bf16",
    "recompute": "none",
    "tokens_per_s_per_gpu": "10000",
}


def runs_of(**changed: str) -> tuple[list[PublishedRun], Any]:
    return parse_runs([ROW | changed])


def test_tokens_a_second_become_seconds_of_a_step() -> None:
    ((run,), _) = runs_of()
    assert run.seconds == pytest.approx(128 * 8192 / (10000 * 64))
    assert (run.kind, run.mapping.zero, run.mapping.data) == ("dense", 3, 64)


def test_a_row_may_name_a_preset_instead_of_its_shape() -> None:
    shape = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    ((run,), _) = runs_of(**shape, model="llama3-8b")
    assert run.workload.model == PRESETS["llama3-8b"]
    runs, (skipped,) = runs_of(**shape)
    assert not runs and "shape is not given" in skipped.reason


def test_an_iteration_time_wins_over_rates() -> None:
    ((run,), _) = runs_of(iter_time_s="1.5")
    assert run.seconds == 1.5


def test_tflops_are_brought_back_by_the_sources_own_formula() -> None:
    common = {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "400"}
    full = runs_of(**common)[0][0].seconds
    causal = runs_of(**common, source="NVIDIA-NeMo/Megatron-Bridge docs")[0][0].seconds
    assert full is not None and causal is not None
    assert causal < full, "half of the attention is counted, so the same rate means less time"
    shape = {"heads": "32", "kv_heads": "32", "hidden": "4096", "ffn": "16384", "seq": "2048"}
    old = runs_of(**common, **shape, source="arXiv:2104.04473", model="GPT", recompute="full")
    new = runs_of(**common, **shape, model="GPT")
    assert old[0][0].seconds == pytest.approx(4 / 3 * new[0][0].seconds, rel=0.03)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"microbatch": ""}, "microbatch is missing"),
        ({"hidden": ""}, "shape is not given"),
        ({"tp": "three"}, "tp = 'three' is not a number"),
        ({"tp": "3"}, "does not divide 64 GPUs"),
        ({"gpu": "Quantum 9000"}, "unknown gpu"),
        ({"tokens_per_s_per_gpu": ""}, "no time, rate or memory"),
        ({"tokens_per_s_per_gpu": "-4"}, "must be above 0"),
        ({"iter_time_s": "1000", "tflops_per_gpu": "400"}, "disagree"),
        ({"pp": "64", "dp": "1"}, "exceeds 32 layers"),
        ({"experts": "8", "topk": "9"}, "topk = 9 exceeds 8 experts"),
        ({"iter_time_s": "1e-6"}, "times the GPU's peak"),
        ({"tokens_per_s_per_gpu": "", "mfu_pct": "150%"}, "times the GPU's peak"),
        ({"tokens_per_s_per_gpu": "", "mfu_pct": "0.45"}, "percents are meant"),
        ({"mem_gb": "500"}, "exceeds the device's 80 GiB"),
        ({"gpu": "TPU v4", "precision": "fp32"}, "TPU v4 has no float32"),
        ({"fragmented": "-5"}, "fragmented"),
    ],
)
def test_a_row_that_cannot_be_compared_is_skipped_with_its_reason(
    changed: dict[str, str], reason: str
) -> None:
    runs, (skipped,) = runs_of(**changed)
    assert not runs and skipped.row == 2 and reason in skipped.reason


@pytest.fixture(scope="module")
def published() -> list[PublishedRun]:
    with resources.as_file(resources.files("phalanx.plan") / "data/published_runs.csv") as path:
        return parse_runs(read_table(Path(path)))[0]


def test_shipped_constants_meet_the_published_runs(published: list[PublishedRun]) -> None:
    report = check_runs(published, [])
    dense = report.groups["dense"]
    assert dense.n > 350
    assert dense.mape <= 0.12 and dense.median <= 0.08
    assert 0.7 <= dense.coverage80 <= 0.9
    assert report.by_source["vtrain"].mape < 0.147
    assert report.groups["moe"].mape < 0.3


def test_constants_survive_their_file() -> None:
    again = read_constants(constants_toml(shipped()))
    assert again.network == pytest.approx(shipped().network, rel=1e-4)
    assert again.matmul.keys() == shipped().matmul.keys()


def test_a_fit_finds_the_constant_that_made_the_runs(published: list[PublishedRun]) -> None:
    from msgspec import structs

    chosen = [run for run in published if run.project == "vtrain"][:20]
    truth = structs.replace(
        prior_constants(), matmul=prior_constants().matmul | {"ampere:bfloat16": 0.7}
    )
    seconds, _ = Replay(chosen).price(truth)
    made = [structs.replace(run, seconds=float(s)) for run, s in zip(chosen, seconds, strict=True)]
    fit = CalibrationFit(made, prior_constants(), [Knob("matmul", "ampere:bfloat16", 0.88, 0.3)])
    constants, _ = fit.validated()
    assert constants.matmul["ampere:bfloat16"] == pytest.approx(0.7, rel=0.02)


def test_leaving_a_project_out_is_harder_than_fitting_it(published: list[PublishedRun]) -> None:
    kept = [run for run in published if run.seconds and run.project in ("vtrain", "megatron")]
    found = calibrate_runs(kept[::4])
    assert set(found.left_out) == {"vtrain:dense", "megatron:dense"}
    assert 0 < found.mape < 0.5
    assert found.constants.error["dense"] > 0
    assert found.unseen["dense"]["n"] == found.runs
    assert 0.3 < found.unseen["dense"]["coverage80"] <= 1
    counted = {label: n for label, n in found.constants.runs.items() if n}
    assert counted.keys() <= {"megatron:dense", "megatron-2021:dense"}
    assert found.constants.seen["1f1b"] > 0 and "zero-bubble" not in found.constants.seen


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_projects_that_were_left_out_are_predicted(published: list[PublishedRun]) -> None:
    found = calibrate_runs([run for run in published if run.seconds is not None])
    assert found.mape <= 0.12 and found.median <= 0.08
    assert found.left_out["vtrain:dense"]["mape"] < 0.147
    assert found.constants.matmul == pytest.approx(shipped().matmul, rel=1e-2)
