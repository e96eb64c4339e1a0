"""Loading: TOML, overrides, presets, and mistakes in shape or type."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import (
    PRESETS,
    ConfigError,
    Job,
    job_from_table,
    load_job,
    problem,
    resolve,
    to_toml,
)


def problems_of(table: dict[str, object], *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        job_from_table(table, overrides)
    return {found.key: f"{found.rule}; {found.fix}" for found in caught.value.problems}


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_with_a_preset_is_a_complete_job(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, '[model]\npreset = "llama3-8b"\n[train]\nsteps = 7\n'))
    assert job.model == PRESETS["llama3-8b"]
    assert job.train.steps == 7


def test_keys_beside_a_preset_win_even_when_they_equal_a_default() -> None:
    job = job_from_table({"model": {"preset": "qwen3-moe-30b-a3b", "qk_norm": False, "layers": 2}})
    assert (job.model.qk_norm, job.model.layers) == (False, 2)
    # Resolving again must not bring the preset's value back.
    assert resolve(job, 1).model.qk_norm is False


def test_tables_below_a_preset_are_merged_key_by_key() -> None:
    job = job_from_table({"model": {"preset": "mixtral-8x7b", "moe": {"top_k": 3}}})
    assert job.model.moe is not None
    assert (job.model.moe.experts, job.model.moe.top_k) == (8, 3)


def test_the_word_none_removes_an_optional_table() -> None:
    job = job_from_table({"model": {"preset": "llama3-1b", "rope_scaling": "none"}})
    assert job.model.rope_scaling is None


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("train.steps=12", "train", "steps", 12),
        ("optimizer.learning_rate=1e-3", "optimizer", "learning_rate", 1e-3),
        ("optimizer.clip_norm=1", "optimizer", "clip_norm", 1.0),
        ("train.deterministic=true", "train", "deterministic", True),
        ("precision.compute=float32", "precision", "compute", "float32"),
        ('precision.compute="float32"', "precision", "compute", "float32"),
        ("data.path=/some/folder", "data", "path", "/some/folder"),
        ("data.path=2024", "data", "path", "2024"),
        ("log.profile_steps=[3, 6]", "log", "profile_steps", (3, 6)),
        ("log.profile_steps=none", "log", "profile_steps", None),
        ("train.seed = 5", "train", "seed", 5),
    ],
)
def test_overrides_are_typed_like_toml(
    override: str, section: str, field: str, value: object
) -> None:
    job = job_from_table({}, [override])
    assert getattr(getattr(job, section), field) == value


def test_a_later_override_wins_over_file_and_earlier_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 1\n")
    assert load_job(path, ["train.steps=2", "train.steps=3"]).train.steps == 3


def test_an_override_may_choose_the_preset() -> None:
    assert job_from_table({}, ["model.preset=tiny"]).model.dim == 128


def test_unknown_keys_name_the_nearest_one() -> None:
    found = problems_of({"trian": {}, "train": {"stps": 1}, "dim": 3}, "parallel.tensr=2")
    assert 'did you mean "train"' in found["trian"]
    assert 'did you mean "steps"' in found["train.stps"]
    assert 'did you mean "tensor"' in found["parallel.tensr"]
    assert 'did you mean "model.dim"' in found["dim"]


def test_wrong_types_and_bounds_are_reported_together() -> None:
    found = problems_of(
        {
            "train": {"steps": "many", "micro_batch": 0, "deterministic": 1, "compile": "onn"},
            "optimizer": {"learning_rate": float("nan"), "beta1": 1.0},
            "model": {"preset": "tinny", "moe": {"experts": 4}},
            "data": 3,
            "parallel": {"zero": 4},
            "log": {"profile_steps": [1]},
        }
    )
    assert "integer" in found["train.steps"]
    assert ">= 1" in found["train.micro_batch"]
    assert "true or false" in found["train.deterministic"]
    assert 'did you mean "on"' in found["train.compile"]
    assert "finite" in found["optimizer.learning_rate"]
    assert "< 1" in found["optimizer.beta1"]
    assert 'did you mean "tiny"' in found["model.preset"]
    assert "missing" in found["model.moe.top_k"]
    assert "[data]" in found["data"]
    assert "0, 1, 2, 3" in found["parallel.zero"]
    assert "array of 2" in found["log.profile_steps"]


@pytest.mark.parametrize("override", ["train.steps", "=3", "name.x=1", ".=1", "train.=1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    assert problems_of({"name": "run"}, override)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[train\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_job(path)
    with pytest.raises(ConfigError, match=r'no such file; did you mean "job.toml"'):
        load_job(tmp_path / "jbo.toml")
    with pytest.raises(ConfigError, match=r"no such file; give the path of a TOML file$"):
        load_job(tmp_path / "another.toml")  # only its suffix is like that of job.toml


@pytest.mark.parametrize("preset", PRESETS)
def test_a_shown_job_loads_back_into_itself(preset: str, tmp_path: Path) -> None:
    job = resolve(job_from_table({"model": {"preset": preset}}), 1)
    assert load_job(write(tmp_path, to_toml(job))) == job


@given(name=st.text(), fraction=st.floats(0, 1), seed=st.integers(0, 2**63 - 1))
def test_any_value_survives_being_shown(name: str, fraction: float, seed: int) -> None:
    import tomllib

    table = {"name": name, "schedule": {"final_fraction": fraction}, "train": {"seed": seed}}
    job: Job = job_from_table(table)
    assert job_from_table(tomllib.loads(to_toml(job))) == job


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert load_job(path).train.steps == 7


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, ".".join(["a"] * 5_000) + " = 1"])
def test_a_file_nested_beyond_reason_is_refused_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_job(write(tmp_path, text))


def test_overrides_nested_beyond_reason_are_refused_in_words() -> None:
    assert "nested" in next(iter(problems_of({}, ".".join(["a"] * 5_000) + "=1").values()))
    assert "array" in problems_of({}, "log.profile_steps=" + "[" * 20_000)["log.profile_steps"]


def test_a_file_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="characters"):
        load_job("/dev/zero")


def test_a_mistake_that_several_rules_find_is_told_once() -> None:
    mistakes = [problem("steps.train.job", name, "is missing", "name one") for name in "aab"]
    assert [each.value for each in ConfigError.of(mistakes).problems] == ["a", "b"]
