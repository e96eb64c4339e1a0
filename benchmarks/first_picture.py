"""How long a newcomer waits from ``git clone`` to a picture on the page.

    python -m benchmarks.first_picture

Clones this repository (what is committed), types ``make demo`` there, opens the link that it prints
in headless Chromium and waits until the job's curves have a point. The environment is made anew;
packages come from pip's cache where it has them: without, the network is measured, too.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.page import chromium
from proof.report import report

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"watch it: (?P<url>\S+/job/1)$")
END_SECONDS = 60
# The view is there, and its curves have a point.
DRAWN = """() => document.documentElement.dataset.ready === "job/1"
  && !document.body.innerText.includes("no step yet")"""


@contextmanager
def demo(clone: Path) -> Iterator[Iterator[str]]:
    """Lines that ``make demo`` prints in a clone; it is ended with the block."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        ["make", "demo", f"PYTHON={python}"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield iter(process.stdout)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(END_SECONDS)


def link(lines: Iterator[str]) -> str:
    """The address of the job's view."""
    for line in lines:
        print(f"  {line}", end="")
        if match := LINK.search(line.rstrip()):
            return match["url"]
    raise SystemExit("make demo ended without a link")


def first_picture(browser: Any, folder: Path, picture: Path | None) -> dict[str, float]:
    """Seconds until the clone is there, the demo prints a line, a link, and the view is drawn."""
    clone, began = folder / "phalanx", time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    seconds = {"clone": time.monotonic() - began}
    with demo(clone) as lines:
        for line in lines:
            if line.startswith("== "):
                break
        seconds["installed"] = time.monotonic() - began
        url = link(lines)
        seconds["link"] = time.monotonic() - began
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_function(DRAWN, timeout=END_SECONDS * 1000)
        seconds["picture"] = time.monotonic() - began
        if picture is not None:
            page.screenshot(path=str(picture))
    return seconds


def main() -> int:
    """Measure once: it takes minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="file that receives what is seen")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-first-picture-") as name,
        chromium() as running,
    ):
        seconds = first_picture(running, Path(name), chosen.picture)
    for what, value in seconds.items():
        print(f"{what:10} {value:7.1f} s")
    return report("first-picture", {f"{what}_seconds": each for what, each in seconds.items()})


if __name__ == "__main__":
    raise SystemExit(main())
