"""Fault models are data with sources; rates come out as published."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.draws import Draws
from phalanx.simulate.incidents import Incidents, causes_of, expected_interruptions
from phalanx.simulate.load import load_scenario
from phalanx.simulate.models import causes_in, model, model_names, rate_of
from phalanx.simulate.shape import make_fleet


@pytest.mark.parametrize("name", model_names())
def test_every_model_says_where_it_comes_from_and_what_its_rate_holds(name: str) -> None:
    file = model(name)
    assert file.about and file.source and file.assumed
    assert file.correlation in ("included", "excluded")
    assert bool(file.domain) == (file.correlation == "excluded")
    shares = [row.share for row in file.cause if row.share]
    assert not shares or math.isclose(sum(shares), 1.0)


def test_the_llama3_model_gives_its_table() -> None:
    causes = causes_in(model("llama3"), gpus=16384, node_gpus=8)
    counts = {cause.name: cause.per_day * 54 for cause in causes}
    assert math.isclose(sum(counts.values()), 419)
    assert math.isclose(counts["gpu_fault"], 148)
    assert math.isclose(counts["hbm_ecc"], 72)
    assert math.isclose(rate_of(model("llama3")), 3.79, abs_tol=0.005)


def test_domains_add_nothing_at_32k_and_make_18_minutes_at_98k() -> None:
    def per_day(gpus: int) -> float:
        found = causes_in(model("meta-98k"), gpus=gpus, node_gpus=8)
        return sum(cause.per_day for cause in found)

    assert math.isclose(per_day(32768), 2.3 * 32768 / 8 / 1000)
    assert math.isclose(86400 / per_day(98304) / 60, 18, rel_tol=0.01)


def test_a_given_rate_is_the_sum_of_all_causes_and_keeps_their_shares() -> None:
    plain = {c.name: c.per_day for c in causes_in(model("rsc-1"), gpus=8000, node_gpus=8)}
    given = causes_in(model("rsc-1"), gpus=8000, node_gpus=8, per_1000=13.0)
    assert math.isclose(sum(c.per_day for c in given), 13.0)
    assert all(math.isclose(c.per_day, 2 * plain[c.name]) for c in given)


def test_the_rate_of_one_cause_can_be_set_and_an_unknown_cause_is_refused() -> None:
    own = causes_in(model("llama3"), gpus=8000, node_gpus=8, own={"hbm_ecc": 5.0, "dram": 0.0})
    rates = {cause.name: cause.per_day for cause in own}
    assert rates["hbm_ecc"] == 5.0 and "dram" not in rates
    with pytest.raises(ConfigError, match="hbm_ecc"):
        causes_in(model("llama3"), gpus=8000, node_gpus=8, own={"hbm_ec": 5.0})


def test_a_model_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('per_1000_node_days = 4.0\n[[cause]]\nname = "nvlink"\nshare = 1\n')
    scenario = load_scenario("llama3-54d", [f"faults.model={path}"])
    assert [cause.name for cause in causes_of(scenario)] == ["nvlink"]
    path.write_text('per_1000_node_days = 4.0\n[[cause]]\nname = "nvlnk"\nshare = 1\n')
    model.cache_clear()
    with pytest.raises(ConfigError, match="nvlink"):
        load_scenario("llama3-54d", [f"faults.model={path}"])


def test_incidents_come_at_the_expected_rate_and_hit_spares_too() -> None:
    scenario = load_scenario("llama3-54d")
    fleet = make_fleet(scenario)
    total = hits = 0
    for seed in range(4):
        for incident in Incidents(scenario, fleet, Draws(seed)):
            if incident.time_ns > 54 * 86400 * 10**9:
                break
            total += 1
            hits += incident.nodes[0] < 2048
    expected = expected_interruptions(scenario)
    assert abs(hits / 4 - expected) < 4 * math.sqrt(expected / 4)
    assert hits < total


def test_a_fault_of_a_domain_takes_all_its_nodes() -> None:
    scenario = load_scenario("100k-1t", ["fleet.rack_nodes=4"])
    fleet = make_fleet(scenario)
    racks = [
        incident
        for incident, _ in zip(Incidents(scenario, fleet, Draws(1)), range(400), strict=False)
        if incident.cause == "power" and len(incident.nodes) > 1
    ]
    assert racks
    for incident in racks:
        power = {int(fleet.columns.power[node]) for node in incident.nodes}
        assert len(power) == 1


def test_lemons_take_their_share_of_all_faults() -> None:
    scenario = load_scenario(
        "llama3-54d", ["faults.lemon_share=0.05", "faults.lemon_factor=10", "days=200"]
    )
    fleet = make_fleet(scenario)
    hits: dict[int, int] = {}
    count = 4000
    for incident, _ in zip(Incidents(scenario, fleet, Draws(0)), range(count), strict=False):
        hits[incident.nodes[0]] = hits.get(incident.nodes[0], 0) + 1
    worst = sorted(hits.values(), reverse=True)[: len(fleet) // 20]
    share = 0.05 * 10 / (0.05 * 10 + 0.95)
    assert sum(worst) / count > 0.9 * share
