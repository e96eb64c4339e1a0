"""The example of docs/cluster.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def test_the_example_places_a_gang(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "Form" in printed


def test_every_file_of_the_room_is_in_the_table():
    page = PAGE.read_text(encoding="utf-8")
    for name in ("core", "gangs", "ladder", "ledger", "agent", "gather", "storage", "watch"):
        assert f"`{name}.py`" in page
