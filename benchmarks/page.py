"""The page in headless Chromium: how fast a view is there, and how fast 12,500 nodes move.

``python -m benchmarks.page`` measures; ``--images docs/images`` also takes the pictures that the
documents show, of a real run with kills and of a played fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.played_fleet import play
from benchmarks.played_runs import play_runs
from proof.report import report

NODES, EVENTS = 12_500, 60_000
RUNS, RUN_STEPS = 1_000, 40
ROUNDS = 7
READY = "name => document.documentElement.dataset.ready === name"
PAN = """async (seconds) => {
  const map = document.querySelector("canvas.map").map;
  const stamps = [], costs = [];
  const end = performance.now() + seconds * 1000;
  await new Promise((done) => {
    const frame = (now) => {
      stamps.push(now);
      const began = performance.now();
      const [x, y] = map.offset;
      map.offset = [x + 3 * Math.sin(now / 300), y + 2 * Math.cos(now / 400)];
      map.draw(true);
      costs.push(performance.now() - began);
      if (now < end) requestAnimationFrame(frame); else done();
    };
    requestAnimationFrame(frame);
  });
  const gaps = stamps.slice(1).map((each, i) => each - stamps[i]).sort((a, b) => a - b);
  costs.sort((a, b) => a - b);
  const p95 = gaps[Math.floor(gaps.length * 0.95)];
  const middle = (values) => values[values.length >> 1];
  return { frames: gaps.length, median: middle(gaps), p95, draw: middle(costs) };
}"""


@contextmanager
def served(state: Path) -> Iterator[str]:
    """A server on a state folder; it ends with the block."""
    command = [sys.executable, "-m", "phalanx", "up", "--state", str(state), "--port", "0"]
    command += ["--json", "--follow", str(os.getpid())]
    if (state / "policy.toml").exists():
        command += ["--policy", str(state / "policy.toml")]
    with (state / "out.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        yield json.loads(_document(process.stdout))["url"]
    finally:
        process.terminate()
        process.wait(20)


def _document(stream: IO[bytes]) -> str:
    """The first JSON document of a stream that stays open."""
    text = ""
    while line := stream.readline().decode():
        text += line
        try:
            json.loads(text)
        except json.JSONDecodeError:
            continue
        return text
    raise RuntimeError("the server said nothing")


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("skipped: Chromium is not installed (make chromium)")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


def visitor(running: Any, url: str, state: Path, size: tuple[int, int], dark: bool = False) -> Any:
    """A page that has its token and no cache."""
    width, height = size
    context = running.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if width < 500 else 1,
    )
    page = context.new_page()
    page.goto(url + "/")
    token = (state / "admin.token").read_text().strip()
    page.evaluate("token => sessionStorage.setItem('phalanx-token', token)", token)
    page.goto("about:blank")
    return page


def opened(page: Any, url: str, view: str) -> float:
    """Seconds until a view has its data, from an empty tab."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(f"{url}/#/{view}")
    path = view.split("?")[0]
    page.wait_for_function(READY, arg=path if "/" in path else path + "/")
    return time.perf_counter() - began


def measure(running: Any, url: str, state: Path) -> dict[str, Any]:
    """Figures of one server."""
    page = visitor(running, url, state, (1440, 900))
    views = {
        view: statistics.median(opened(page, url, view) for _ in range(ROUNDS))
        for view in ("fleet", "jobs", "events", "queue")
    }
    opened(page, url, "fleet")
    pan = page.evaluate(PAN, 4)
    page.evaluate("() => document.querySelector('canvas.map').map.zoomBy(6)")
    near = page.evaluate(PAN, 3)
    first = fetched(url, state, "/v1/fleet")[1]["first_ns"]
    now = time.time_ns()
    back = [
        fetched(url, state, f"/v1/fleet?at_ns={first + (now - first) * i // 20}") for i in range(20)
    ]
    whole = [fetched(url, state, "/v1/fleet") for _ in range(ROUNDS)]
    return {
        "seconds_until_view": {name: round(each, 3) for name, each in views.items()},
        "pan_all": pan,
        "pan_near": near,
        "fleet_ms": round(1e3 * statistics.median(each[0] for each in whole), 1),
        "fleet_kilobytes": round(len(json.dumps(whole[0][1], separators=(",", ":"))) / 1e3),
        "past_ms": round(1e3 * statistics.median(each[0] for each in back), 1),
        "past_worst_ms": round(1e3 * max(each[0] for each in back), 1),
    }


def measure_runs(running: Any, folder: Path, nodes: int) -> dict[str, float]:
    """Seconds until a view is there, of a server that keeps a thousand runs."""
    state = folder / "runs"
    play_runs(state, RUNS, RUN_STEPS, nodes=nodes)
    with served(state) as url:
        page = visitor(running, url, state, (1440, 900))
        return {
            view: round(statistics.median(opened(page, url, view) for _ in range(ROUNDS)), 3)
            for view in ("runs", "submit", "alerts")
        }


def fetched(url: str, state: Path, path: str) -> tuple[float, Any]:
    """Seconds of a request, and its answer."""
    token = (state / "admin.token").read_text().strip()
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        data = answer.read()
    return time.perf_counter() - began, json.loads(data)


def main() -> int:
    """Measure, print, and take pictures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--images", type=Path, help="folder for the documents' pictures")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-page-") as name, chromium() as running:
        state = Path(name) / "server"
        play(state, chosen.nodes, EVENTS)
        with served(state) as url:
            figures = {"nodes": chosen.nodes, **measure(running, url, state)}
            figures["load_average"] = round(os.getloadavg()[0], 1)
            print(json.dumps(figures, indent=1))
            if chosen.images is not None:
                from benchmarks.page_images import of_fleet, of_runs, of_slow_rank

                of_fleet(running, url, state, chosen.images)
                of_slow_rank(running, Path(name), chosen.images)
                of_runs(running, Path(name), chosen.images)
        figures["seconds_with_1000_runs"] = measure_runs(running, Path(name), chosen.nodes)
        print(json.dumps(figures["seconds_with_1000_runs"]))
    if chosen.images is not None:
        from benchmarks.page_images import of_run

        of_run(chosen.images)
    views = figures["seconds_until_view"]
    claimed = {
        "fleet_view_seconds": views["fleet"],
        "jobs_view_seconds": views["jobs"],
        "runs_view_seconds": figures["seconds_with_1000_runs"]["runs"],
        "frame_ms": figures["pan_all"]["median"],
        "fleet_ms": figures["fleet_ms"],
        "past_ms": figures["past_ms"],
    }
    return report("page", claimed)


if __name__ == "__main__":
    sys.exit(main())
