"""The site has every page, and pages for newcomers name settings that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs.generator.markdown import anchor, slug
from docs.generator.settings import job_file
from docs.versions import list_versions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^\s+- .*: (\S+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_settings_that_pages_for_newcomers_name_exist() -> None:
    known = {doc.key for doc in job_file()}
    sections = {key.partition(".")[0] for key in known}
    for page in sorted((DOCS / "coming-from").glob("*.md")):
        right = [
            row.rsplit("|", 2)[-2]
            for row in page.read_text(encoding="utf-8").splitlines()
            if row.startswith("|")
        ]
        named = re.findall(r"`([a-z_]+\.[a-z_.]+?)(?: = \S+)?`", "\n".join(right))
        ours = {key for key in named if key.partition(".")[0] in sections}
        assert ours <= known, page.name


def test_headings_have_the_anchors_that_pages_link_to() -> None:
    assert slug("A & b (c)", "-") == anchor("A & b (c)") == "a--b-c"


def test_versions_are_listed_the_newest_first_and_the_index_leads_there(tmp_path: Path) -> None:
    for name in ("0.2.0", "0.10.0", "0.9.1", "assets"):
        (tmp_path / name).mkdir()
    assert list_versions(tmp_path) == ["0.10.0", "0.9.1", "0.2.0"]
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["0.10.0", "0.9.1", "0.2.0"]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


@pytest.mark.soak
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "tutorials" / "first-run.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.js").exists() and "iframe-worker.js" in page
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]*"', page) == []
    if (program := shutil.which("chromium")) is None:
        pytest.skip("the site is built; Chromium, which would search in it, is not installed")
    assert "Checkpoints" in _search(program, tmp_path / "tutorials" / "first-run.html", "keeper")
    assert _copied(program, tmp_path / "tutorials" / "first-cluster.html", "phalanx nodes") == (
        "phalanx nodes"
    )


def _search(program: str, page: Path, word: str) -> list[str]:
    """Titles that the search of a page offers which was opened from a disk."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.goto(page.as_uri())
        opened.click(".md-search__input")
        opened.keyboard.type(word)
        titles = opened.locator(".md-search-result__item h1")
        titles.first.wait_for()
        found = titles.all_inner_texts()
        browser.close()
    return found


def _copied(program: str, page: Path, block: str) -> str:
    """What the button of the first block with some words in it puts on the clipboard."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        allowed = ["clipboard-read", "clipboard-write"]
        opened = browser.new_context(permissions=allowed).new_page()
        opened.goto(page.as_uri())
        opened.locator(".highlight", has_text=block).first.locator("button").click()
        copied = opened.evaluate("navigator.clipboard.readText()")
        browser.close()
    return str(copied)
