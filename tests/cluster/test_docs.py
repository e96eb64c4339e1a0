"""The examples of the pages about the core run as they stand, and its files are described."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.cluster.ledger.buckets import BUCKETS, ESTIMATED

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts"
CORE = Path(__file__).parents[2] / "phalanx" / "cluster"


def test_the_examples_place_a_gang_and_say_why_another_waits(capsys):
    pages = [
        (CONCEPTS / name).read_text(encoding="utf-8") for name in ("cluster-core.md", "queue.md")
    ]
    for page in pages:
        for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(example, "docs/concepts", "exec"), {})
    printed = capsys.readouterr().out
    assert "Form" in printed
    assert printed.splitlines()[-1] in pages[-1].replace("\n", " ")


def test_every_file_and_folder_of_the_core_is_in_the_table():
    page = (CONCEPTS / "cluster-core.md").read_text(encoding="utf-8")
    names = [path.name for path in CORE.glob("*.py") if path.name != "__init__.py"]
    names += [f"{path.parent.name}/" for path in CORE.glob("*/__init__.py")]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_bucket_of_the_ledger_is_explained():
    page = (CONCEPTS / "ledger.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE))
    assert sorted(rows) == sorted(BUCKETS)
    assert {name for name, row in rows.items() if "(estimated)" in row} == set(ESTIMATED)
