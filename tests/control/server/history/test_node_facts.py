"""Facts of nodes keep the time since when they are so."""

from __future__ import annotations

from pathlib import Path

from phalanx.control.server.history.node_facts import (
    NodeFactHistory,
    Report,
    Told,
    described,
    set_up,
)
from phalanx.doctor.setup import NodeSetup, bad_setup
from phalanx.hardware.probe.description import Fact, NodeDescription


def report(value: str, time_ns: int, source: str = "setup", aspect: str = "version") -> Report:
    return Report("a", source, (Told(aspect, "torch", value),), time_ns)  # type: ignore[arg-type]


def stored(history: NodeFactHistory) -> dict[str, tuple[str, int, str]]:
    return {f.key: (f.value, f.since_ns, f.before) for f in history.facts({"a": "h100"})}


def test_a_fact_has_the_time_of_its_last_change(tmp_path: Path) -> None:
    history = NodeFactHistory(tmp_path / "nodes.sqlite")
    history.store([report("2.7", 1)])
    history.store([report("2.7", 2)])
    assert stored(history) == {"torch": ("2.7", 1, "")}
    history.store([report("2.8", 3)])
    history.close()
    again = NodeFactHistory(tmp_path / "nodes.sqlite")
    again.store([report("2.8", 4)])
    assert stored(again) == {"torch": ("2.8", 3, "2.7")}
    again.store([Report("a", "setup", (), 5)])  # it does not say it any more
    assert stored(again) == {}
    again.close()


def test_a_speed_keeps_its_time_while_it_strays_little(tmp_path: Path) -> None:
    history = NodeFactHistory(tmp_path / "nodes.sqlite")
    for number, value in enumerate(("600", "610", "590", "500")):
        history.store([report(value, number, "acceptance", "speed")])
    assert stored(history) == {"torch": ("500", 3, "600")}
    history.close()


def test_what_differs_by_design_is_no_fact(tmp_path: Path) -> None:
    description = NodeDescription(
        facts=(Fact("driver", "570", "x"), Fact("leaf", "su1", "x"), Fact("cpus", 96, "x"))
    )
    found = described("a", description, 7)
    assert found.facts == (Told("version", "driver", "570"), Told("hardware", "cpus", "96"))
    setup = NodeSetup(versions={"torch": "2.8"}, settings={"os.thp": "pass"})
    assert [told.aspect for told in set_up("a", setup, 7).facts] == ["version", "setting"]


def test_drift_is_found_anew_after_a_change(tmp_path: Path) -> None:
    history = NodeFactHistory(tmp_path / "nodes.sqlite")
    kinds = dict.fromkeys("abc", "h100")
    for name, value in zip("abc", ("1", "1", "2"), strict=True):
        history.store([Report(name, "setup", (Told("setting", "os.thp", value),), 1)])
    drift, told = history.drift(kinds)
    assert [each.node for each in drift.differences] == ["c"] and told == {"a", "b", "c"}
    history.store([Report("c", "setup", (Told("setting", "os.thp", "1"),), 2)])
    assert not history.drift(kinds)[0].differences
    assert not history.drift({"a": "h100"})[0].compared.get("x")
    history.close()


def test_a_setup_is_bounded() -> None:
    assert not bad_setup(NodeSetup(versions={"torch": "2"}, settings={}))
    assert bad_setup(NodeSetup(versions={str(n): "" for n in range(65)}, settings={}))
    assert bad_setup(NodeSetup(versions={}, settings={"os.thp": "x" * 600}))
