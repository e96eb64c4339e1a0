"""What MkDocs is told about our pages: links into the repository, which the site does not have."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
VERSIONED = "PHALANX_DOCS_VERSIONED"  # set while one of several versions is built
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:)[^)#\s]+)(?P<rest>[^)]*)\)")


def on_config(config: Any, **_: Any) -> Any:
    """Of several versions a page offers the others (``docs/versions.py``)."""
    if os.environ.get(VERSIONED):
        config.extra["version"] = {"provider": "mike"}  # reads ../versions.json
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside docs/ become their names."""
    folder = PurePosixPath("docs", page.file.src_uri).parent
    return LINK.sub(lambda link: _inside(link, folder), markdown)


def _inside(link: re.Match[str], folder: PurePosixPath) -> str:
    path = (ROOT / folder / link["target"]).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return link.group(0)
    named = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else link["target"]
    text = link["text"]
    return text if named in text else f"{text} (`{named}`)"
