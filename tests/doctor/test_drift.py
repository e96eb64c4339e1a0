"""Who differs from most nodes of its kind, by facts of played nodes."""

from __future__ import annotations

from phalanx.doctor.drift import Aspect, NodeFact, find_drift, same_speed


def facts(
    values: dict[str, str], aspect: Aspect = "version", key: str = "driver", kind: str = "h100"
) -> list[NodeFact]:
    return [
        NodeFact(node=node, kind=kind, aspect=aspect, key=key, value=value, since_ns=number)
        for number, (node, value) in enumerate(values.items())
    ]


def test_whoever_differs_from_the_majority_is_named() -> None:
    found = find_drift(facts({"a": "570", "b": "560", "c": "570", "d": "570"}))
    (one,) = found.differences
    assert (one.node, one.value, one.usual, one.alike, one.nodes) == ("b", "560", "570", 3, 4)
    assert one.since_ns == 1 and not found.undecided and found.compared == {"h100": 4}


def test_a_tie_names_nobody() -> None:
    found = find_drift(facts({"a": "570", "b": "560", "c": "570", "d": "560"}))
    assert not found.differences
    assert [(u.key, u.values, u.why) for u in found.undecided] == [
        ("driver", 2, "no value has a majority")
    ]


def test_two_nodes_name_nobody() -> None:
    found = find_drift(facts({"a": "570", "b": "560"}))
    assert not found.differences and "fewer than 3" in found.undecided[0].why
    assert find_drift(facts({"a": "570", "b": "570"})).undecided == []


def test_kinds_are_compared_among_themselves() -> None:
    mixed = facts({"a": "570", "b": "570", "c": "570"})
    mixed += facts({"x": "550", "y": "550", "z": "540"}, kind="a100")
    assert [each.node for each in find_drift(mixed).differences] == ["z"]


def test_slow_nodes_differ_in_speed_and_noise_does_not() -> None:
    rates = {"a": "600", "b": "603", "c": "597", "d": "500"}
    (one,) = find_drift(facts(rates, "speed", "gemm cuda:0")).differences
    assert one.node == "d" and 0.82 < one.share < 0.85 and one.alike == 3
    steady = {"a": "600", "b": "603", "c": "597", "d": "590"}
    assert not find_drift(facts(steady, "speed", "gemm cuda:0")).differences
    pair = find_drift(facts({"a": "600", "b": "300"}, "speed", "gemm cuda:0"))
    assert not pair.differences and pair.undecided


def test_a_speed_that_strays_is_the_same() -> None:
    assert same_speed("600", "615") and not same_speed("600", "560") and same_speed("0", "0")
