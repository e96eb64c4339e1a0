"""The picture of a run: every task and every wait, and text of users that is only text."""

from __future__ import annotations

from xml.etree import ElementTree

from phalanx.pipelines.picture import graph_svg
from tests.cluster.pipelines.played_run import PlayedRun

SVG = "{http://www.w3.org/2000/svg}"


def test_every_task_is_a_box_with_its_state_and_every_wait_a_line() -> None:
    steps = {
        "a": {"command": ["true"], "gpus": 2, "outputs": {"out": "a"}},
        "b": {
            "command": ["true"],
            "for_each": {"x": ["<script>", "2"]},
            "inputs": {"a": "a.out"},
        },
    }
    run = PlayedRun(steps).begin()
    run.time_ns += 3600 * 10**9
    run.finish("a")
    run.fail("b[x=<script>]", 'said "<&>"')
    picture = ElementTree.fromstring(graph_svg(run.machine))
    texts = [each.text for each in picture.iter(f"{SVG}text")]
    assert texts[:2] == ["a", "done · 3600.0 s · 2.00 GPU-h"]
    assert "b[x=<script>]" in texts and "running · 0.0 s" in texts
    assert len(list(picture.iter(f"{SVG}rect"))) == 3
    assert len(list(picture.iter(f"{SVG}path"))) == 2
    columns = {each.get("x") for each in picture.iter(f"{SVG}rect")}
    assert len(columns) == 2
