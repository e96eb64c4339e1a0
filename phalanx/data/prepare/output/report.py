"""What became of a corpus' documents: one report, the same for any number of workers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.data.corpus.manifest import CorpusManifest
from phalanx.data.durable_files import write_atomically
from phalanx.data.prepare.counts import EMPTY, UNREADABLE, DroppedExample, FilterCounts
from phalanx.data.prepare.output.report_page import html_page
from phalanx.data.prepare.output.report_text import markdown
from phalanx.data.prepare.output.summary import (
    EXACT,
    NEAR,
    NO_TOKENS,
    REPORT_NAME,
    PrepareReport,
    ReportStep,
)
from phalanx.data.prepare.recipe import PrepareRecipe
from phalanx.data.prepare.rules.registry import RULES, chosen_rules


def report_steps(
    recipe: PrepareRecipe, counts: FilterCounts, duplicates: dict[str, int], no_tokens: int
) -> tuple[ReportStep, ...]:
    """Everything documents had to pass, in order, with how many did not."""
    says = {UNREADABLE: "records that cannot be read", EMPTY: "documents without text"}
    for name in chosen_rules(recipe.filter.rules, {}):
        changes = recipe.filter.thresholds.get(name, {})
        shown = ", ".join(f"{threshold} = {value}" for threshold, value in changes.items())
        says[name] = RULES[name].says + (f" Here: {shown}." if shown else "")
    for each in recipe.classifier:
        says[each.function] = f"its score is at least {each.least:g}"
        says[f"{each.function} failed"] = "the classifier gave no score"
    if recipe.decontaminate:
        says["decontaminate"] = f"shares {recipe.decontaminate.words} words with no evaluation set"
    dropped = dict(counts.dropped)
    if recipe.deduplicate:
        says |= {EXACT: "its text stands nowhere before"}
        says |= {NEAR: f"none before has a Jaccard similarity of {recipe.deduplicate.jaccard:g}"}
        dropped |= duplicates
    says[NO_TOKENS] = "the tokenizer gives it tokens"
    dropped[NO_TOKENS] = no_tokens
    steps, left = [], counts.records
    for name, sentence in says.items():
        left -= dropped.get(name, 0)
        step = ReportStep(name, sentence, dropped.get(name, 0), left, counts.edited.get(name, 0))
        steps.append(step)
    return tuple(steps)


def make_report(
    key: str,
    recipe: PrepareRecipe,
    counts: FilterCounts,
    duplicates: dict[str, int],
    examples: dict[str, list[DroppedExample]],
    manifest: CorpusManifest,
    no_tokens: int,
) -> PrepareReport:
    """The report of a corpus that is complete."""
    return PrepareReport(
        key=key,
        out=recipe.out,
        files=manifest.source.files,
        records=counts.records,
        text_bytes=counts.text_bytes,
        steps=report_steps(recipe, counts, duplicates, no_tokens),
        documents=manifest.documents,
        kept_bytes=manifest.source.text_bytes,
        tokens=manifest.tokens,
        vocab=manifest.vocab,
        shards=len(manifest.files),
        fingerprint=manifest.fingerprint,
        failed=counts.failed,
        masked=counts.masked,
        lengths_read=counts.lengths_read,
        lengths_kept=counts.lengths_kept,
        examples=counts.examples | {name: some for name, some in examples.items() if some},
    )


def write_report(out: Path, report: PrepareReport) -> None:
    """As text, as a page, and last as data: its presence says that all is done."""
    write_atomically(out / "report.md", markdown(report).encode())
    write_atomically(out / "report.html", html_page(report).encode())
    write_atomically(out / REPORT_NAME, msgspec.json.encode(report))
