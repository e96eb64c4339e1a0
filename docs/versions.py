"""The site of this version beside those of others: ``make docs-version``.

``build/versions`` has a folder for each version that was built into it, ``versions.json``, from
which pages offer the others, and an ``index.html`` that leads to the newest. Serve and keep it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from docs.site_hooks import VERSIONED
from phalanx import __version__

SITES = Path(__file__).parents[1] / "build" / "versions"
TO_NEWEST = """<!doctype html>
<meta charset="utf-8">
<title>Phalanx</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">Phalanx {newest}</a>
"""


def list_versions(sites: Path) -> list[str]:
    """Write down which versions lie in a folder, and lead to the newest; the newest first."""
    names = [path.name for path in sites.iterdir() if re.fullmatch(r"\d+(\.\d+)*", path.name)]
    names.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in names]
    (sites / "versions.json").write_text(json.dumps(entries), encoding="utf-8")
    (sites / "index.html").write_text(TO_NEWEST.format(newest=names[0]), encoding="utf-8")
    return names


def main() -> int:
    """Build this version, and list it with the others."""
    folder = SITES / __version__
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    code = subprocess.run(command, env=os.environ | {VERSIONED: "1"}, check=False).returncode
    if code == 0:
        print(f"{SITES / 'index.html'}: {', '.join(list_versions(SITES))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
