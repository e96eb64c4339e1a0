"""A real headless Chromium for tests of the page, and what it complained about."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.shared_folder import network

SIZES = {"phone": (390, 844), "desk": (1440, 900), "wall": (2560, 1440)}
VIOLATIONS = """() => axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] })
  .then(({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html.slice(0, 200)]))"""
READY = "name => document.documentElement.dataset.ready === name"


def chromium() -> str:
    """Path of Debian's Chromium; the test is skipped where it is not installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("Chromium is not installed: `make chromium` as root, or apt install it")
    return found


def axe_core(folder: Path) -> str:
    """The source of axe-core as npm fetches it; the test is skipped where it cannot."""
    program = shutil.which("npm")
    if program is None:
        pytest.skip("npm is not installed: axe-core cannot be fetched")
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [program, "install", "--prefix", str(folder), "--no-audit", "--no-fund"]
        done = subprocess.run([*command, "axe-core@4"], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"axe-core cannot be fetched: {done.stderr[-200:]}")
    return script.read_text()


class Tab:
    """A page of the browser with everything that went wrong in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.problems: list[str] = []
        self.requested: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} {message.location}")

    @property
    def elsewhere(self) -> list[str]:
        """Requests to anything but this server."""
        own = urlsplit(self.url).netloc
        return [each for each in self.requested if urlsplit(each).netloc != own]

    def barriers(self, axe: str) -> list[list[str]]:
        """What axe-core finds in the view against WCAG 2.1 A and AA: a rule, and where."""
        self.page.evaluate(axe)
        return list(self.page.evaluate(VIOLATIONS))

    def sign_in(self, token: str, view: str = "fleet") -> None:
        """Open a view with a token that the page already has."""
        self.page.add_init_script(f"sessionStorage.setItem('phalanx-token', {json.dumps(token)})")
        self.show(view)

    def show(self, view: str) -> None:
        """Go to a view and wait until it has its data."""
        self.page.goto(f"{self.url}/#/{view}")
        path = view.split("?")[0]
        self.page.wait_for_function(READY, arg=path if "/" in path else path + "/")

    def text(self) -> str:
        """What the view says."""
        return str(self.page.inner_text("#main"))

    def wait_for_text(self, text: str) -> None:
        """Until the view says something."""
        self.page.get_by_text(text).first.wait_for()


# Answers that a test changes on their way count as coming from the open network, from which
# Chromium would not let a page speak to loopback.
ARGUMENTS = ["--no-sandbox", "--disable-features=LocalNetworkAccessChecks"]


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    program = chromium()
    sync_api = pytest.importorskip("playwright.sync_api")
    with network(), sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield running
        running.close()


@contextmanager
def tab(running: Any, url: str, size: str = "desk", dark: bool = False) -> Iterator[Tab]:
    """A page of a visitor whom the browser has never seen."""
    width, height = SIZES[size]
    context = running.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.set_default_timeout(90_000)
    try:
        yield Tab(page, url)
    finally:
        # A request that a test answers itself may be under way: it is let end first.
        page.unroute_all(behavior="wait")
        context.close()
