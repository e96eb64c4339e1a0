"""Runs the ``$ phalanx …`` examples of a page again and writes what they print below them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n.*?```", re.DOTALL)


def refreshed(page: str) -> str:
    """The page with every example's output renewed."""
    return BLOCK.sub(_run, page)


def _run(block: re.Match[str]) -> str:
    # A fixed width and no colours, so that a page does not depend on who refreshes it.
    environment = os.environ | {"COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"}
    command = block["command"]
    done = subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, check=True
    )
    # After a pipe into head the shell reports head's success alone.
    assert done.stdout, f"{command}: {done.stderr}"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "```console\n$ " + command + "\n" + "\n".join(lines).strip("\n") + "\n```"


def main() -> None:
    """Refresh the pages that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
