"""Figures in README and docs: links into the evidence whose text is what was measured last.

    a killed worker costs [1.02 s](evidence.md#recovery "recovery.worker_median")

The title names claim and figure, and ``python -m proof --write`` renews the text. Numbers with a
unit that are no such links must be listed with their origin in ``proof/other_figures.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from proof import evidence
from proof.claims import CLAIMS
from proof.history import ROOT, Measurement, newest

EVIDENCE = ROOT / "docs" / "evidence.md"
OTHERS = ROOT / "proof" / "other_figures.toml"
ORIGINS = ("settings", "inputs", "published", "simulated", "profiles", "packages")

LINK = re.compile(
    r"\[(?P<text>[^\]]*)\]\((?P<page>[\w./]*evidence\.md)#(?P<anchor>[\w-]+) "
    r'"(?P<claim>[\w-]+)\.(?P<figure>[\w-]+)"\)'
)
UNIT = (
    r"(?:[mµun]?s|seconds?|min|minutes?|h|hours?|%|x|×|times|[kKMGT]i?B(?:/s)?|[TG]FLOP/s"
    r"|(?:[a-z]+ )?a (?:CPU )?second|[a-z]*/s)"
)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.`-]){NUMBER}(?:\s?(?:to|-|–|/)\s?{NUMBER})?\s?{UNIT}(?![\w`])")


class Stray(NamedTuple):
    """A number that looks measured and is no link into the evidence."""

    page: str
    line: int
    text: str


def pages() -> list[Path]:
    """README and every page of docs but the evidence itself."""
    return [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p != EVIDENCE)]


def write(measurements: list[Measurement]) -> None:
    """Renew the evidence and every figure that links to it."""
    EVIDENCE.write_text(evidence.page(measurements), encoding="utf-8")
    shown = newest(measurements)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        renewed = LINK.sub(lambda link: _renewed(link, shown), text)
        if renewed != text:
            path.write_text(renewed, encoding="utf-8")


def _renewed(link: re.Match[str], shown: dict[str, Measurement]) -> str:
    words = _measured(link, shown)
    whole = link.group(0)
    return whole if words is None else whole.replace(f"[{link['text']}]", f"[{words}]", 1)


def _measured(link: re.Match[str], shown: dict[str, Measurement]) -> str | None:
    measurement = shown.get(link["claim"])
    if measurement is None or link["figure"] not in measurement.figures:
        return None
    figure = CLAIMS[link["claim"]].figure(link["figure"])
    return figure.show(measurement.figures[link["figure"]])


def wrong_links(measurements: list[Measurement]) -> list[str]:
    """Links whose figure is not known, was never measured, or says something else by now."""
    shown = newest(measurements)
    wrong = []
    for path in pages():
        for link in LINK.finditer(path.read_text(encoding="utf-8")):
            name = f"{path.name}: {link['claim']}.{link['figure']}"
            claim = CLAIMS.get(link["claim"])
            if claim is None or link["figure"] not in {f.name for f in claim.figures}:
                wrong.append(f"{name} is claimed nowhere")
            elif link["anchor"] != link["claim"]:
                wrong.append(f"{name} links to #{link['anchor']}")
            elif (words := _measured(link, shown)) is None:
                wrong.append(f"{name} was never measured")
            elif words != link["text"]:
                wrong.append(f"{name} says {link['text']!r}, measured is {words!r}")
    return wrong


def stray_figures() -> list[Stray]:
    """Numbers with a unit in prose and tables that come neither from the store nor from a list."""
    listed = other_figures()
    return [
        stray
        for path in pages()
        for stray in figures_of(path)
        if stray.text not in listed.get(stray.page, ())
    ]


def other_figures() -> dict[str, set[str]]:
    """By page, numbers that are no measurements of ours, or that no command can repeat."""
    table = tomllib.loads(OTHERS.read_text(encoding="utf-8"))
    unknown = set(table) - set(ORIGINS)
    assert not unknown, f"{OTHERS.name}: no such origin: {sorted(unknown)}"
    found: dict[str, set[str]] = {}
    for by_page in table.values():
        for page, texts in by_page.items():
            found.setdefault(page, set()).update(texts)
    return found


def figures_of(path: Path) -> Iterator[Stray]:
    """Every number with a unit outside code and links of a page."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            prose = re.sub(r"`[^`]*`", "``", LINK.sub("", line))
            for match in FIGURE.finditer(prose):
                page = str(path.relative_to(ROOT))
                yield Stray(page, number, " ".join(match.group(0).split()))
