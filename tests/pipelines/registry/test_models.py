"""The registry: versions in order, one release at a time, gates before it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.pipelines.registry.models import ModelRegistry, ModelVersion, Promotion, RegistryError
from phalanx.pipelines.registry.promote import check_gate, promote


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry(tmp_path / "models")


def model(content: str = "a", **scores: float) -> ModelVersion:
    return ModelVersion(
        name="toy", version=0, checkpoint="/c", content=content, scores=scores, registered="now"
    )


def test_versions_count_up_and_the_same_weights_keep_theirs(registry: ModelRegistry) -> None:
    assert [registry.register(model(content)).version for content in "abab"] == [1, 2, 1, 2]
    assert registry.get("toy").version == 2 and registry.get("toy", 1).content == "a"
    assert registry.names() == ["toy"] and registry.get("toy").stage == "candidate"


def test_two_who_register_at_once_get_two_versions(registry: ModelRegistry) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: registry.register(model(str(number))), range(16)))
    assert sorted(each.version for each in made) == list(range(1, 17))


def test_a_release_takes_the_place_of_the_one_before(registry: ModelRegistry) -> None:
    first, second = registry.register(model("a")), registry.register(model("b"))
    assert registry.released("toy") is None
    promote(registry, first, "released")
    promote(registry, second, "released")
    assert [each.stage for each in registry.versions("toy")] == ["archived", "released"]
    assert registry.versions("toy")[0].history[-1].reason == "replaced by 2"
    released = registry.released("toy")
    assert released is not None and released.version == 2


def test_a_gate_refuses_a_worse_model_with_its_score(registry: ModelRegistry) -> None:
    promote(registry, registry.register(model("a", loss=2.0)), "released")
    worse = registry.register(model("b", **{"loss": 2.1, "docs.loss": 1.0}))
    with pytest.raises(RegistryError, match=r"toy 2 stays candidate: .* is 2.1 \(released: 2\)"):
        promote(registry, worse, "released", ["loss <= released + 0.5 %"])
    assert registry.get("toy", 2).stage == "candidate"
    assert len(check_gate(worse, ["loss <= released + 10 %", "docs.loss < 2"], registry)) == 2
    with pytest.raises(RegistryError, match=r"has no score mmlu \(it has: loss, docs.loss\)"):
        check_gate(worse, ["mmlu > 1"], registry)
    for text in ("", "loss", "loss < x"):
        with pytest.raises(RegistryError, match="is not a condition"):
            check_gate(worse, [text], registry)


def test_a_webhook_is_told_of_a_promotion_and_of_no_refusal(registry: ModelRegistry) -> None:
    told: list[tuple[str, bytes]] = []

    def post(url: str, data: bytes) -> str:
        told.append((url, data))
        return "answered 500"

    made = registry.register(model("a", loss=2.0))
    with pytest.raises(RegistryError):
        promote(registry, made, "released", ["loss < 1"], "http://x", post)
    assert told == []
    assert promote(registry, made, "released", [], "http://x", post).told == "answered 500"
    assert json.loads(told[0][1])["model"]["stage"] == "released"


def test_what_is_not_there_or_damaged_is_said(registry: ModelRegistry) -> None:
    with pytest.raises(RegistryError, match=r"has no model toy \(it has: none\)"):
        registry.get("toy")
    registry.register(model())
    with pytest.raises(RegistryError, match=r"toy has no version 7 \(it has: 1\)"):
        registry.get("toy", 7)
    for name in ("", "../x", "a/b", ".x"):
        with pytest.raises(RegistryError, match="is not a valid model name"):
            registry.get(name)
    (registry.folder / "toy" / "0001.json").write_text("{")
    with pytest.raises(RegistryError, match="cannot be read"):
        registry.versions("toy")


def test_who_knows_an_older_state_of_a_version_forgets_no_move(registry: ModelRegistry) -> None:
    seen = registry.register(model("a"))
    for stage in ("released", "archived"):
        registry.change_stage(seen, Promotion(time="now", who="me", stage=stage))
    assert [each.stage for each in registry.get("toy").history] == ["released", "archived"]


def test_of_all_that_are_released_at_once_one_is_left(registry: ModelRegistry) -> None:
    made = [registry.register(model(str(number))) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: promote(registry, each, "released"), made))
    assert [each.stage for each in registry.versions("toy")].count("released") == 1
