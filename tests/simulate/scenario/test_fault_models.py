"""Fault models are data with sources; rates come out as published."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.fault_models import model, model_names, rate_of
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.rates import CauseRate, causes_in, causes_of
from phalanx.simulate.scenario.scenario import FaultPart, Scenario
from phalanx.simulate.scenario.shape import make_fleet
from phalanx.simulate.world.incidents import (
    Incident,
    Incidents,
    expected_interruptions,
    lemons,
)


def in_fleet(name: str, gpus: int, **settings: object) -> list[CauseRate]:
    return causes_in(model(name), FaultPart(model=name, **settings), gpus=gpus, node_gpus=8)  # type: ignore[arg-type]


def first(scenario: Scenario, count: int, seed: int = 0) -> list[Incident]:
    faults = Incidents(scenario, make_fleet(scenario), SeedDraws(seed))
    return [fault for fault, _ in zip(faults, range(count), strict=False)]


@pytest.mark.parametrize("name", model_names())
def test_every_model_says_where_it_comes_from_and_what_its_rate_holds(name: str) -> None:
    file = model(name)
    assert file.about and file.source and file.assumed
    assert file.correlation in ("included", "excluded")
    assert bool(file.domain) == (file.correlation == "excluded")
    shares = [row.share for row in file.cause if row.share]
    assert not shares or math.isclose(sum(shares), 1.0)


def test_the_llama3_model_gives_its_table() -> None:
    causes = in_fleet("llama3", 16384)
    counts = {cause.name: cause.per_day * 54 for cause in causes}
    assert math.isclose(sum(counts.values()), 419)
    assert math.isclose(counts["gpu_fault"], 148)
    assert math.isclose(counts["hbm_ecc"], 72)
    assert math.isclose(rate_of(model("llama3")), 3.79, abs_tol=0.005)


def test_domains_add_nothing_at_32k_and_make_18_minutes_at_98k() -> None:
    def per_day(gpus: int) -> float:
        found = in_fleet("meta-98k", gpus)
        return sum(cause.per_day for cause in found)

    assert math.isclose(per_day(32768), 2.3 * 32768 / 8 / 1000)
    assert math.isclose(86400 / per_day(98304) / 60, 18, rel_tol=0.01)


def test_a_given_rate_is_the_sum_of_all_causes_and_keeps_their_shares() -> None:
    plain = {c.name: c.per_day for c in in_fleet("rsc-1", 8000)}
    given = in_fleet("rsc-1", 8000, per_1000_node_days=13.0)
    assert math.isclose(sum(c.per_day for c in given), 13.0)
    assert all(math.isclose(c.per_day, 2 * plain[c.name]) for c in given)


def test_the_rate_of_one_cause_can_be_set_and_an_unknown_cause_is_refused() -> None:
    own = in_fleet("llama3", 8000, causes={"hbm_ecc": 5.0, "dram": 0.0})
    rates = {cause.name: cause.per_day for cause in own}
    assert rates["hbm_ecc"] == 5.0 and "dram" not in rates
    with pytest.raises(ConfigError, match="hbm_ecc"):
        in_fleet("llama3", 8000, causes={"hbm_ec": 5.0})


def test_a_cause_is_set_wherever_it_comes_from() -> None:
    def rates(**causes: float) -> dict[str, float]:
        return {cause.key: cause.per_day for cause in in_fleet("meta-98k", 98304, causes=causes)}

    usual = rates()
    assert {"power@node", "power@rack", "power@power", "driver@scattered"} <= usual.keys()
    assert "driver@scattered" not in rates(driver=0.0)
    power = {key: rate for key, rate in rates(power=2.0).items() if key.startswith("power@")}
    assert math.isclose(sum(power.values()), 2.0 * 12.288)
    assert math.isclose(power["power@rack"] / power["power@power"], 3.0)
    assert math.isclose(rates(**{"power@rack": 1.0})["power@rack"], 12.288)
    assert rates(**{"power@rack": 1.0})["power@power"] == usual["power@power"]


def test_a_model_without_domains_can_be_given_faults_of_whole_racks() -> None:
    scenario = load_scenario(
        "llama3-54d", ["faults.per_1000_node_days=0", "faults.causes.power@rack=3"]
    )
    assert {len(fault.nodes) for fault in first(scenario, 50)} == {2}


def test_all_faults_together_are_the_sum_of_those_set_by_name_and_the_others() -> None:
    plain = {c.name: c.per_day for c in in_fleet("llama3", 8000)}
    given = in_fleet("llama3", 8000, per_1000_node_days=4.0, causes={"gpu_fault": 3.0})
    rates = {cause.name: cause.per_day for cause in given}
    assert math.isclose(sum(rates.values()), 4.0) and rates["gpu_fault"] == 3.0
    assert math.isclose(rates["hbm_ecc"] / rates["nic"], plain["hbm_ecc"] / plain["nic"])
    only = in_fleet("llama3", 8000, per_1000_node_days=0.0, causes={"gpu_fault": 3.0})
    assert [(cause.name, cause.per_day) for cause in only] == [("gpu_fault", 3.0)]


def test_the_rate_of_all_domains_can_be_set() -> None:
    def domains(**settings: object) -> float:
        causes = in_fleet("meta-98k", 8000, **settings)
        return sum(cause.per_day for cause in causes if cause.scope != "node")

    assert domains() == 0.0
    assert math.isclose(domains(domain_per_1000_node_days=4.0), 4.0)
    both = {"domain_per_1000_node_days": 4.0, "causes": {"driver": 1.0}}
    assert math.isclose(domains(**both), 4.0)
    assert math.isclose(
        sum(c.per_day for c in in_fleet("meta-98k", 8000, **both)), 6.3, rel_tol=1e-3
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["faults.per_1000_node_days=2", "faults.causes.gpu_fault=3"], "3 are set by narrower"),
        (["faults.causes.power@rack=3", "faults.causes.power=2"], "narrower"),
        (["faults.causes.power@rak=3"], "no such kind of domain"),
        (["faults.causes.power@scattered=3"], "how many nodes"),
        (["faults.domain_per_1000_node_days=3"], "means nothing"),
        (["faults.domains=false"], "means nothing"),
    ],
)
def test_rates_that_cannot_be_together_are_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_scenario("llama3-54d", settings)


def test_a_model_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('per_1000_node_days = 4.0\n[[cause]]\nname = "nvlink"\nshare = 1\n')
    scenario = load_scenario("llama3-54d", [f"faults.model={path}"])
    assert [cause.name for cause in causes_of(scenario)] == ["nvlink"]
    path.write_text('per_1000_node_days = 4.0\n[[cause]]\nname = "nvlnk"\nshare = 1\n')
    model.cache_clear()
    with pytest.raises(ConfigError, match="nvlink"):
        load_scenario("llama3-54d", [f"faults.model={path}"])


BASE = "per_1000_node_days = 4.0\n"
CAUSE = '[[cause]]\nname = "nvlink"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BASE + 'like = "{path}"\n', "in a circle"),
        ("per_1000_node_days = 1e300\n" + CAUSE + "share = 1\n", "<= 1e.06"),
        ("gpus = 1\ndays = 1\n" + CAUSE + "count = 1e9\n", "more than 1,000,000"),
        ("gpus = 8\ndays = 9\n" + CAUSE + "share = 1\n", "needs a count"),
        (BASE + CAUSE, "needs a share"),
        (BASE + CAUSE + "share = 1\nrepair_hours = 1e300\n", "repair_hours"),
        (BASE + "gpus = 8\ndays = 9\n" + CAUSE + "count = 1\n", "together with gpus and days"),
        (BASE + 'like = "llama3"\n' + CAUSE + "share = 1\n", "causes of the model's own"),
        (
            BASE + CAUSE + 'share = 1\n[[domain]]\nname = "power"\nscope = "rack"\nshare = 1\n',
            "in the rate already",
        ),
    ],
)
def test_a_model_that_would_not_say_what_it_means_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("{path}", str(path)))
    with pytest.raises(ConfigError, match=told):
        load_scenario("llama3-54d", [f"faults.model={path}"])


def test_models_that_name_each_other_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(f'{BASE}like = "{other}"\n')
    other.write_text(f'{BASE}like = "{one}"\n')
    with pytest.raises(ConfigError, match="in a circle"):
        load_scenario("llama3-54d", [f"faults.model={one}"])


def test_incidents_come_at_the_expected_rate_and_hit_spares_too() -> None:
    scenario = load_scenario("llama3-54d")
    fleet = make_fleet(scenario)
    total = hits = 0
    for seed in range(4):
        for incident in Incidents(scenario, fleet, SeedDraws(seed)):
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
        for incident, _ in zip(Incidents(scenario, fleet, SeedDraws(1)), range(400), strict=False)
        if incident.cause == "power" and len(incident.nodes) > 1
    ]
    assert racks
    for incident in racks:
        power = {int(fleet.columns.power[node]) for node in incident.nodes}
        assert len(power) == 1


@pytest.mark.parametrize(("share", "factor"), [(0.02, 10), (0.3, 10), (0.3, 1), (0.9, 5)])
def test_lemons_fail_as_many_times_as_often_as_others_as_was_set(
    share: float, factor: float
) -> None:
    scenario = load_scenario(
        "llama3-54d", [f"faults.lemon_share={share}", f"faults.lemon_factor={factor}"]
    )
    count = 20_000
    nodes = len(make_fleet(scenario))
    bad = set(lemons(scenario, nodes, SeedDraws(0)))
    hits = sum(fault.nodes[0] in bad for fault in first(scenario, count))
    expected = len(bad) * factor / (len(bad) * factor + nodes - len(bad))
    assert abs(hits / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_lemons_leave_the_rate_of_the_fleet_as_it_was() -> None:
    scenario = load_scenario("llama3-54d", ["faults.lemon_share=0.2", "days=400"])
    end = 400 * 86400 * 10**9
    found = [fault for fault in first(scenario, 5000) if fault.time_ns <= end]
    hits = sum(fault.nodes[0] < 2048 for fault in found)
    expected = expected_interruptions(scenario)
    assert len(found) < 5000 and abs(hits - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("name", ["100k-1t", "llama3-54d"])
def test_nodes_of_jobs_meet_the_same_faults_however_many_spares_there_are(name: str) -> None:
    def met(spares: int) -> list[tuple[int, str, tuple[int, ...]]]:
        settings = [f"fleet.spare_nodes={spares}", "faults.lemon_share=0.02"]
        scenario = load_scenario(name, settings)
        jobs = scenario.fleet.gpus // 8
        faults = first(scenario, 1500)
        rows = [
            (fault.time_ns, fault.cause, tuple(node for node in fault.nodes if node < jobs))
            for fault in faults
        ]
        return [row for row in rows if row[2]][:1000]

    assert met(0) == met(212)


def test_the_rate_of_one_cause_leaves_the_faults_of_others_as_they_were() -> None:
    def others(*settings: str) -> list[Incident]:
        faults = first(load_scenario("llama3-54d", settings), 600)
        return [fault for fault in faults if fault.cause != "hbm_ecc"][:300]

    assert others() == others("faults.causes.hbm_ecc=0") == others("faults.causes.hbm_ecc=2")
