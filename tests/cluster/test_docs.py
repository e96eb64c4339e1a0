"""The examples of docs/concepts/cluster-core.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "cluster-core.md"


def test_the_examples_place_a_gang_and_say_why_another_waits(capsys):
    page = PAGE.read_text(encoding="utf-8")
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(example, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "Form" in printed
    assert printed.splitlines()[-1] in page.replace("\n", " ")


def test_every_file_and_folder_of_the_core_is_in_the_table():
    page = PAGE.read_text(encoding="utf-8")
    core = PAGE.parents[2] / "phalanx" / "cluster"
    names = [path.name for path in core.glob("*.py") if path.name != "__init__.py"]
    names += [f"{path.parent.name}/" for path in core.glob("*/__init__.py")]
    assert [name for name in names if f"`{name}`" not in page] == []
