"""Placeholders: filled when they are known, doubled braces stay braces."""

from __future__ import annotations

import sysconfig

from phalanx.cluster.pipelines.templates import builtin, fill, fill_paths, placeholders


def test_values_are_filled_first_and_paths_later() -> None:
    text = fill("--seed={seed} {inputs.text} {{print}} {flag}", {"seed": 3, "flag": True})
    assert text == "--seed=3 {inputs.text} {{print}} true"
    assert fill_paths(["x" + text], {"inputs.text": ["/a"]}) == ["x--seed=3 /a {print} true"]


def test_a_word_of_many_files_becomes_many_words() -> None:
    words = fill_paths(["cat", "{inputs.text}", "-"], {"inputs.text": ["/a", "/b c"]})
    assert words == ["cat", "/a", "/b c", "-"]


def test_names_are_found_and_doubled_braces_are_none() -> None:
    assert placeholders("{a} {{b}} {inputs.c} {d") == ["a", "inputs.c"]


def test_every_step_knows_where_the_standard_library_is() -> None:
    assert builtin() == {"stdlib": sysconfig.get_paths()["stdlib"]}
