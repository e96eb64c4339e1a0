"""Tables as people write them: other spellings, units and blanks, and nothing that crashes."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import ConfigError
from phalanx.plan.evidence.calibrate import calibrate
from phalanx.plan.evidence.check import check_rows, check_runs
from phalanx.plan.evidence.columns import BEYOND_HEADINGS, tidy
from phalanx.plan.evidence.published import PublishedRun, parse_runs, read_table
from tests.plan.evidence.test_published import ROW

FIELDS = tuple(ROW)
SOME = [
    *("", "nan", "NaN", "n/a", "-", "none", "0", "-1", "1", "2", "3", "8", "1.5", "1e9", "1e400"),
    *("8k", "4M", "~128", "1,024", "OOM", "inf", "true", "12 ms", ">1", "MLA", "moe1024", "½"),
    *("H800", "MI300X", "TPUv4", "A10G", "FP8", "NVFP4", "interleaved", "\ufeff", "'", "x" * 300),
]


def one(**changed: str) -> PublishedRun:
    runs, skipped = parse_runs([ROW | changed])
    assert not skipped
    return runs[0]


def test_other_spellings_mean_the_same() -> None:
    others = {
        "hidden": "Hidden Size",
        "num_gpus": "GPUs",
        "global_batch": "GBS",
        "microbatch": "Micro-Batch Size",
        "tokens_per_s_per_gpu": "tokens/sec/GPU",
        "seq": "seq_len",
        "kv_heads": "num_query_groups",
    }
    row = {others.get(name, name.upper()): value for name, value in ROW.items()}
    assert parse_runs([row])[0] == parse_runs([ROW])[0]


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        ({"num_gpus": "64.0"}, "gpus", 64),
        ({"seq": "8k"}, "sequence", 8192),
        ({"global_batch": "1M"}, "global_batch", 128),
        ({"global_batch": "1,024"}, "global_batch", 1024),
        ({"global_batch": "130"}, "global_batch", 128),
        ({"vpp": "none"}, "virtual_stages", 1),
        ({"zero_fsdp": "ZeRO stage 2"}, "zero", 2),
        ({"zero_fsdp": "distributed optimizer"}, "zero", 1),
        ({"recompute": "true"}, "recompute", "full"),
        ({"vocab": "n/a"}, "vocab", 51200),
        ({"gpu": "NVIDIA H800"}, "gpu", "h800"),
        ({"gpu": "8x A100 SXM 40GB"}, "gpu", "a100-40g"),
        ({"gpu": "AMD Instinct MI300X"}, "gpu", "mi300x"),
        ({"gpu": "TPU v4"}, "gpu", "tpu-v4"),
        ({"gpu": "GB200 NVL72"}, "gpu", "gb200"),
        ({"experts": "8", "topk": "2"}, "kind", "moe"),
        ({"notes": "DualPipe", "pp": "2"}, "schedule", "dualpipe"),
    ],
)
def test_values_are_read_as_they_are_meant(
    changed: dict[str, str], field: str, value: object
) -> None:
    run = one(**{"tokens_per_s_per_gpu": "1000"} | changed)  # that any of these GPUs makes
    found: dict[str, Any] = {
        "gpus": run.mapping.gpus,
        "sequence": run.workload.sequence,
        "global_batch": run.workload.global_batch,
        "vocab": run.workload.model.vocab,
        "gpu": run.cluster.gpu.key,
        "kind": run.kind,
    }
    assert found.get(field, getattr(run.mapping, field, None)) == value


def test_columns_that_no_prediction_reads_are_listed(tmp_path: Path) -> None:
    table = [[*ROW, "act_ckpt_freq", "Rack"], [*ROW.values(), "2", "R7", "beyond"]]
    table[0][table[0].index("recompute")] = "act_ckpt"
    report = check_rows(write(tmp_path, table))
    assert report.unread == {"act_ckpt_freq": 1, "Rack": 1, BEYOND_HEADINGS: 1}
    assert not report.assumed and len(report.rows) == 1


def test_milliseconds_become_seconds() -> None:
    assert one(iter_time_s="1500 ms").seconds == pytest.approx(1.5)
    (row,) = tidy([ROW | {"iter_time_ms": "1500"}])
    assert float(row["iter_time_s"]) == pytest.approx(1.5)


def test_an_unknown_gpu_is_never_taken_for_another() -> None:
    for name in ("A10G", "H20", "RTX 4090", "TPU v5e", "MI210", "L40S", "B2000"):
        runs, (skipped,) = parse_runs([ROW | {"gpu": name}])
        assert not runs and "unknown gpu" in skipped.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"precision": "eight"}, "unknown precision 'eight'"),
        ({"ffn": "1e30"}, "ffn = '1e30' is not a number"),
        ({"ffn": "99999999999"}, "ffn = '99999999999' must be 1 to"),
        ({"tokens_per_s_per_gpu": "1e30"}, "must be above 0 and below"),
        ({"gpu": ""}, "gpu is missing"),
    ],
)
def test_what_cannot_be_meant_is_skipped_and_not_guessed(
    changed: dict[str, str], reason: str
) -> None:
    runs, (skipped,) = parse_runs([ROW | changed])
    assert not runs and reason in skipped.reason


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_tabs_and_semicolons_separate_columns_too(tmp_path: Path, separator: str) -> None:
    path = write(tmp_path, [list(ROW), list(ROW.values())], separator)
    assert parse_runs(read_table(path))[0] == parse_runs([ROW])[0]


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [[*ROW, "tp"], [*ROW.values(), "8"]])
    with pytest.raises(ConfigError, match='the column "tp" more than once'):
        read_table(path)


def test_a_fit_to_nothing_says_why(tmp_path: Path) -> None:
    path = write(tmp_path, [list(ROW), list((ROW | {"gpu": "abacus"}).values())])
    with pytest.raises(ConfigError, match=r"line 2: unknown gpu 'abacus'"):
        calibrate(path)


def write(folder: Path, rows: list[list[str]], separator: str = ",") -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(SOME), max_size=4))
def test_garbage_is_skipped_with_a_reason_and_never_crashes(changed: dict[str, str]) -> None:
    runs, skipped = parse_runs([ROW | changed])
    assert len(runs) + len(skipped) == 1
    assert all(one.reason for one in skipped)
    assert all(run.seconds is None or run.seconds > 0 for run in runs)
    for row in check_runs(runs, skipped).rows:
        assert math.isfinite(row.error) and row.predicted_seconds > 0


def test_a_file_with_few_columns_and_ragged_lines_is_checked(tmp_path: Path) -> None:
    names = [
        *("model", "layers", "hidden", "ffn", "seq", "gpu", "num_gpus"),
        *("tp", "pp", "microbatch", "global_batch", "tokens_per_s_per_gpu"),
    ]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerow([ROW[name] for name in names])
        writer.writerow([ROW[name] for name in names][:4])
        writer.writerow([*(ROW[name] for name in names), "beyond", "the headings"])
    report = check_rows(path)
    assert report.groups["dense"].n == 2
    assert [skipped.row for skipped in report.skipped] == [3]


def test_an_empty_file_gives_an_empty_report(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("", encoding="utf-8")
    report = check_rows(path)
    assert not report.rows and not report.skipped
    assert {name: errors.n for name, errors in report.groups.items()} == {
        "dense": 0,
        "moe": 0,
        "all": 0,
    }
