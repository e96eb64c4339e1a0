"""The page before 12,500 nodes: the map moves, and one slow rank of 100,000 is seen and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.played_job import Slowed, play_slow_rank
from tests.control.servers import ServerProcess
from tests.observe.browser import Tab, browser, chromium, tab

pytestmark = pytest.mark.timeout(500)  # a cluster and a browser on whatever machine
NODES, STEPS, SINCE = 12_500, 32, 9
MOST_STEPS = 20  # until the rank is named
PANNED = """() => {
  const { map } = document.querySelector("canvas.map");
  const before = map.canvas.toDataURL();
  map.offset = [map.offset[0] + 40, map.offset[1] - 30];
  map.draw(true);
  return map.canvas.toDataURL() !== before;
}"""
REDDEST = """() => {
  const { image } = document.querySelector(".heat canvas").heat;
  const { data } = image.getContext("2d").getImageData(0, 0, image.width, image.height);
  const rows = [];
  for (let y = 0; y < image.height; y++) {
    let red = 0;
    for (let x = 0; x < image.width; x++) {
      const at = 4 * (y * image.width + x);
      if (data[at] > data[at + 2] + 60) red++;
    }
    rows.push(red / image.width);
  }
  return rows;
}"""


class Large:
    """A server that was left behind by a job on the whole fleet."""

    def __init__(self, server: ServerProcess, slowed: Slowed) -> None:
        self.server, self.slowed = server, slowed


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    chromium()
    state: Path = tmp_path_factory.mktemp("large") / "server"
    slowed = play_slow_rank(state, NODES, STEPS, SINCE)
    with ServerProcess(state, "--policy", str(state / "policy.toml")) as server:
        yield Large(server, slowed)


@pytest.fixture(scope="module")
def at(large: Large) -> Iterator[Tab]:
    with browser() as running, tab(running, large.server.url) as opened:
        yield opened
        # Chromium minds that a test looks at pixels again and again.
        assert [each for each in opened.problems if "willReadFrequently" not in each] == []
        assert opened.elsewhere == []


def test_a_map_of_12500_nodes_moves_and_finds_any_of_them(large: Large, at: Tab) -> None:
    at.sign_in(large.server.admin())
    assert "12,500 nodes" in at.page.get_attribute("canvas.map", "aria-label")
    assert at.page.evaluate(PANNED)
    at.page.fill("input[type=search]", large.slowed.node)
    at.page.keyboard.press("Enter")
    at.page.wait_for_function("() => !document.querySelector('.mapbox .hint').hidden")
    assert large.slowed.node in at.page.inner_text(".mapbox .hint")


def test_a_slow_rank_of_100000_is_named_in_time_and_red_on_the_heat_map(
    large: Large, at: Tab
) -> None:
    slowed = large.slowed
    assert 0 < slowed.named_at <= slowed.since + MOST_STEPS
    at.sign_in(large.server.admin(), "job/1")
    finding: Any = at.page.locator(".finding").first
    assert f"rank {slowed.rank}" in finding.inner_text() and slowed.node in finding.inner_text()
    named = at.page.inner_text(".named")
    assert slowed.node in named and "% slower" in named
    rows = at.page.evaluate(REDDEST)
    reddest = max(range(len(rows)), key=rows.__getitem__)
    assert rows[reddest] > 0.5 and sorted(rows)[-2] < 0.1
    assert reddest == int(slowed.rank / 8 / NODES * len(rows))
