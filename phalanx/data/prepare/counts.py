"""What became of the documents: counts and examples of every step, added up over files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from phalanx.data.errors import DataError
from phalanx.data.prepare.read.file_formats import SourceDocument, UnreadableRecord
from phalanx.data.prepare.recipe import PrepareRecipe

Name = TypeVar("Name", str, int)

FEW_LOST = 10  # documents, of which a small corpus may lose up to half without a refusal
SHOWN_CHARACTERS = 300  # of an example
EMPTY = "empty"
UNREADABLE = "unreadable"


class DroppedExample(msgspec.Struct, frozen=True):
    """A document that was dropped, and why."""

    file: str  # its path; in a group's counts, the number within the group
    record: int
    id: str
    reason: str
    text: str  # its beginning


class FilterCounts(msgspec.Struct):
    """Documents of a group of files, or of all, from reading to the last mask."""

    records: int = 0  # that were read, also those that could not be
    text_bytes: int = 0  # of documents that were read
    kept: int = 0
    kept_bytes: int = 0
    dropped: dict[str, int] = {}  # by rule, classifier, or "decontaminate"
    edited: dict[str, int] = {}  # documents that a rule shortened
    failed: dict[str, int] = {}  # documents about which a classifier failed
    asked: dict[str, int] = {}  # documents about which it was asked
    masked: dict[str, int] = {}  # matches of each mask
    lengths_read: dict[int, int] = {}  # documents by the power of two of their characters
    lengths_kept: dict[int, int] = {}
    examples: dict[str, list[DroppedExample]] = {}

    def read(self, document: SourceDocument) -> None:
        """A document was found."""
        self.records += 1
        self.text_bytes += len(document.text.encode())
        add(self.lengths_read, len(document.text).bit_length())

    def keep(self, text: str) -> None:
        """It passed everything."""
        self.kept += 1
        self.kept_bytes += len(text.encode())
        add(self.lengths_kept, len(text).bit_length())

    def drop(self, rule: str, reason: str, document: SourceDocument, file: int, most: int) -> None:
        """A rule was against it; of the first ones, an example is kept."""
        add(self.dropped, rule)
        shown = self.examples.setdefault(rule, [])
        if len(shown) < most:
            text = document.text[:SHOWN_CHARACTERS]
            shown.append(DroppedExample(str(file), document.record, document.id, reason, text))

    def unreadable(self, found: UnreadableRecord, file: int, most: int) -> None:
        """A record could not be read."""
        self.records += 1
        add(self.dropped, UNREADABLE)
        shown = self.examples.setdefault(UNREADABLE, [])
        if len(shown) < most:
            shown.append(DroppedExample(str(file), found.record, "", found.reason, ""))


def add(counts: dict[Name, int], name: Name, count: int = 1) -> None:
    """Count under a name."""
    counts[name] = counts.get(name, 0) + count


def refuse_losses(counts: FilterCounts, recipe: PrepareRecipe) -> None:
    """Refuse where too much could not be read or judged for the rest to mean anything."""
    lost = counts.dropped.get(UNREADABLE, 0)
    if _too_many(lost, counts.records, recipe.read.most_unreadable):
        first = counts.examples[UNREADABLE][0]
        rule = (
            f"{lost:,} of {counts.records:,} records cannot be read, more than"
            f" read.most_unreadable allows; the first: {first.reason}"
        )
        fix = "correct read.text_key or the files, or allow more"
        raise DataError("read.inputs", f"{first.file}:{first.record}", rule, fix)
    for each in recipe.classifier:
        failed, asked = counts.failed.get(each.function, 0), counts.asked.get(each.function, 0)
        if _too_many(failed, asked, each.most_failed):
            first = counts.examples[f"{each.function} failed"][0]
            rule = (
                f"fails on {failed:,} of {asked:,} documents, more than most_failed allows; the"
                f" first ({first.file}:{first.record}): {first.reason}"
            )
            raise DataError("classifier.function", each.function, rule, "mend it, or allow more")
    if not counts.kept:
        shown = ", ".join(f"{count:,} by {name}" for name, count in counts.dropped.items())
        rule = f"none of {counts.records:,} records passes (dropped: {shown})"
        raise DataError("filter.rules", list(recipe.filter.rules), rule, "choose other thresholds")


def _too_many(lost: int, total: int, share: float) -> bool:
    """More than a share, and not just a handful of a small corpus."""
    few = lost <= FEW_LOST and 2 * lost <= total
    return lost > share * total and not few


def total_counts(
    parts: Iterable[tuple[Sequence[str], FilterCounts]], most_examples: int
) -> FilterCounts:
    """The sum over groups, each given with its paths; examples are the first in their order."""
    total = FilterCounts()
    for paths, part in parts:
        for field in ("records", "text_bytes", "kept", "kept_bytes"):
            setattr(total, field, getattr(total, field) + getattr(part, field))
        for field in ("dropped", "edited", "failed", "asked", "masked"):
            for name, count in getattr(part, field).items():
                add(getattr(total, field), name, count)
        for field in ("lengths_read", "lengths_kept"):
            for length, count in getattr(part, field).items():
                add(getattr(total, field), length, count)
        for name, examples in part.examples.items():
            shown = total.examples.setdefault(name, [])
            named = (msgspec.structs.replace(each, file=paths[int(each.file)]) for each in examples)
            shown.extend(list(named)[: most_examples - len(shown)])
    return total
