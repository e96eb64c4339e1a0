"""Every mistake carries its key, value, rule and what to write instead."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from phalanx.config import PRESETS, ConfigError, ConfigProblem, Job, check, job_from_table
from phalanx.config.explain import catalogue
from phalanx.config.tree import section_in
from tests.config import fix_sentences

FITTING: dict[str, Any] = {
    "model.dim": 64,
    "model.layers": 4,
    "model.heads": 4,
    "model.ffn": 128,
    "model.vocab": 64,
    "data.sequence": 64,
    "train.device": "cpu",
    "train.global_batch": 16,
    "world size": 1,
}
EXPERTS = {"model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 32}


def problems_of(table: dict[str, Any], *overrides: str, world_size: int = 1) -> list[ConfigProblem]:
    try:
        check(job_from_table(table, overrides), world_size)
    except ConfigError as error:
        return list(error.problems)
    return []


# override, what the fix says
NEAREST = [
    ("parallel.zero=4", "nearest: 3"),
    ("parallel.zero=-7", "nearest: 0"),
    ("parallel.schedule=1f1bb", 'did you mean "1f1b"?'),
    ("parallel.schedule=dance", 'the default is "1f1b"'),
    ("train.steps=many", "the default is 100"),
    ('train.steps="50"', "nearest: 50"),
    ("train.steps=0", "nearest: 1"),
    ("train.steps=-5", "nearest: 1"),
    ("train.steps=99.6", "nearest: 100"),
    ("train.steps=1e3", "write 1000"),
    ("train.steps=true", "the default is 100"),
    ("train.micro_batch=[1]", "the default is 1"),
    ("train.deterministic=1", "write true"),
    ("train.deterministic=off", "write false"),
    ("train.deterministic=perhaps", "the default is false"),
    ("optimizer.learning_rate=0", "the default is 0.0003"),
    ("optimizer.learning_rate=nan", "the default is 0.0003"),
    ("optimizer.beta1=1.0", "the default is 0.9"),
    ("schedule.final_fraction=1.5", "nearest: 1"),
    ("schedule.final_fraction=-1", "nearest: 0"),
    ("log.profile_steps=7", "e.g. [0, 3]"),
    ("data.blend=corpus", "write [data.blend.NAME]"),
    ("data.stages=3", "write [[data.stages]]"),
    ("train.seed=9223372036854775808", "nearest: 9223372036854775807"),
    ("model.layers=1000000000000", "nearest: 10000"),
    ("train.micro_batch=10000000000", "nearest: 1000000000"),
    ("train.collective_timeout_seconds=1e300", "nearest: 100000000.0"),
]


@pytest.mark.parametrize(("override", "fix"), NEAREST, ids=[case[0] for case in NEAREST])
def test_a_wrong_value_names_the_nearest_right_one(override: str, fix: str) -> None:
    (found,) = problems_of({"model": {"preset": "tiny"}}, override)
    assert found.key == override.partition("=")[0]
    assert fix in found.fix, found


@pytest.mark.parametrize(
    ("override", "fix"),
    [case for case in NEAREST if case[1].startswith("nearest: ")],
    ids=[case[0] for case in NEAREST if case[1].startswith("nearest: ")],
)
def test_the_nearest_value_is_accepted_by_its_field(override: str, fix: str) -> None:
    key, nearest = override.partition("=")[0], fix.removeprefix("nearest: ")
    job_from_table({"model": {"preset": "tiny"}}, [f"{key}={nearest}"])


GARBAGE: list[Any] = ["junk", -(10**30), 10**30, 0.5, True, [], [1], {}, {"a": 1}, float("inf"), ""]


@pytest.mark.parametrize("value", GARBAGE, ids=[repr(value) for value in GARBAGE])
def test_garbage_in_any_key_is_accepted_or_refused_with_key_value_rule_and_fix(value: Any) -> None:
    for doc in catalogue():
        if "NAME" in doc.key or "[" in doc.key:
            continue
        table: dict[str, Any] = {"model": {"preset": "tiny-moe"}}
        *above, name = doc.key.split(".")
        at = table
        for section in above:
            at = at.setdefault(section, {})
        at[name] = value
        for found in problems_of(table, world_size=2):
            assert found.key and found.rule and found.fix, found
            assert str(found).count("; ") >= 1


def test_an_unknown_key_shows_the_value_it_was_given() -> None:
    (found,) = problems_of({"model": {"preset": "tiny"}}, "parallel.tensr=2")
    assert str(found) == 'parallel.tensr = 2: is no known key; did you mean "tensor"?'


def test_a_missing_key_says_what_to_add() -> None:
    found = problems_of({"model": {"preset": "tiny", "moe": {"experts": 4, "ffn": 8}}})
    assert "add top_k = an integer >= 1" in found[0].fix


def test_a_batch_that_does_not_fill_a_pipeline_is_mended_without_empty_places() -> None:
    table = {"model": {"preset": "tiny"}, "parallel": {"data": 2, "pipeline": 2}}
    (found,) = problems_of(table, "train.micro_batch=8", "train.global_batch=16", world_size=4)
    assert found.key == "train.global_batch"
    assert found.fix == "nearest: 32, or set train.micro_batch = 4"


# name: settings of which one thing is wrong
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "zero-bubble needs two stages a rank, and there is a layer for each rank": {
        "model.layers": 4,
        "parallel.pipeline": 4,
        "parallel.schedule": "zero-bubble",
        "world size": 4,
    },
    "interleaved needs two stages a rank, and there is a layer for each rank": {
        "model.layers": 4,
        "parallel.pipeline": 4,
        "parallel.schedule": "interleaved",
        "world size": 4,
    },
    "three divides neither the experts nor the ranks": {
        **EXPERTS,
        "parallel.expert": 3,
        "world size": 4,
    },
    "what divides the experts does not divide the ranks": {
        **EXPERTS,
        "parallel.expert": 8,
        "world size": 6,
    },
    "more stages than layers on ranks that fewer do not divide": {
        "model.layers": 3,
        "parallel.pipeline": 4,
        "world size": 8,
    },
    "a tensor axis that no group of heads fits": {"parallel.tensor": 3, "world size": 6},
    "ranks that the axes do not divide": {"parallel.tensor": 2, "world size": 7},
    "ulysses over more ranks than heads": {
        "parallel.context": 8,
        "parallel.context_method": "ulysses",
        "world size": 8,
    },
    "too few micro-batches to fill the pipeline": {
        "parallel.pipeline": 4,
        "train.global_batch": 8,
        "train.micro_batch": 4,
        "world size": 8,
    },
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_every_fix_of_every_problem_is_accepted(name: str) -> None:
    settings = {**FITTING, **CONTRADICTIONS[name]}
    found = fix_sentences.problems_of(settings)
    assert found
    keys = {each.key for each in found}
    for each in found:
        for changed in fix_sentences.alternatives(each, settings):
            left = fix_sentences.problems_of(changed)
            assert len(left) < len(found) and {p.key for p in left} <= keys, (each, left)
            assert not left or len(found) > 1, (each, left)


AXES: dict[str, list[Any]] = {
    "parallel.pipeline": [1, 2, 3, 4],
    "parallel.schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble"],
    "parallel.virtual_stages": [1, 2, 3],
    "parallel.tensor": [1, 2, 3],
    "parallel.context": [1, 2, 3],
    "parallel.context_method": ["ring", "ulysses"],
    "parallel.data": [1, 2, 3],
    "parallel.replicate": [1, 2, 3],
    "parallel.zero": [0, 1, 2, 3],
    "parallel.expert": [2, 3, 4],
    "data.document_mask": [True],
    "memory.recompute": ["selective", "full"],
    "train.compile": ["on", "off"],
    "model.layers": [2, 3, 8],
    "model.kv_heads": [1, 2],
    "model.vocab": [64, 65, 66],
    "data.sequence": [32, 48, 64],
    "train.global_batch": [4, 6, 16],
    "train.micro_batch": [2, 4],
}


def test_fixes_of_any_mesh_lead_to_one_that_is_accepted() -> None:
    """One wrong thing is mended by any of its fixes, several by the first of each in turn."""
    dice = random.Random(5)
    for _ in range(250):
        settings = {**FITTING, **(EXPERTS if dice.random() < 0.5 else {})}
        settings |= {
            key: dice.choice(values) for key, values in AXES.items() if dice.random() < 0.3
        }
        settings["world size"] = dice.choice([1, 2, 3, 4, 6, 8, 12])
        found = fix_sentences.problems_of(settings)
        if len(found) == 1:
            for changed in fix_sentences.alternatives(found[0], settings):
                assert fix_sentences.problems_of(changed) == [], (settings, found)
        mended, rounds = settings, 0
        while left := fix_sentences.problems_of(mended):
            mended = next(fix_sentences.alternatives(left[0], mended))
            rounds += 1
            assert rounds <= 10, (settings, left)


ABSURD = [
    (["model.layers=9999", "model.dim=1000000", "model.heads=1000"], "model.layers", "10^16"),
    (
        ["train.micro_batch=10000000", "train.global_batch=10000000"],
        "train.micro_batch",
        "hold",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "rule"), ABSURD, ids=["model", "batch"])
def test_sizes_that_are_absurd_together_are_refused(
    overrides: list[str], key: str, rule: str
) -> None:
    table = {"model": {"preset": "tiny", "head_dim": 0, "kv_heads": 0}}
    found = [p for p in problems_of(table, *overrides) if p.key == key]
    assert found and rule in found[0].rule and "nearest: " in found[0].fix


def test_an_absurd_number_of_ranks_is_refused() -> None:
    found = problems_of({"model": {"preset": "tiny"}}, world_size=10**12)
    assert any(p.key == "world size" and "nearest: 10000000" in p.fix for p in found)


def test_every_default_and_preset_lies_within_its_bounds() -> None:
    for preset in PRESETS:
        job_from_table({"model": {"preset": preset}})
    assert section_in(Job) is Job
    assert msgspec.convert(msgspec.to_builtins(Job()), Job) == Job()


def test_overlapped_tensor_parallelism_is_refused_on_a_cpu() -> None:
    table = {"model": {"preset": "tiny"}, "parallel": {"async_tensor": True, "tensor": 2}}
    assert problems_of(table, world_size=2) == []
    (found,) = problems_of(table, "train.device=cpu", world_size=2)
    assert found.key == "parallel.async_tensor" and "cpu" in found.rule and "cuda" in found.fix
