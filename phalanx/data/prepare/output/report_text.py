"""The report as a page of text."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.data.prepare.output.summary import PrepareReport

_BAR = 40  # characters of the longest bar


def markdown(report: PrepareReport) -> str:
    """The report as a page of text."""
    lines = [
        f"# {report.out}",
        "",
        f"{report.records:,} records of {report.files:,} files ({report.text_bytes:,} bytes)"
        f" became {report.documents:,} documents ({report.kept_bytes:,} bytes) and"
        f" {report.tokens:,} tokens in {report.shards:,} shards, vocabulary {report.vocab:,}.",
        "",
        "## What was dropped",
        "",
        "| step | dropped | of what reached it | left | edited | rule |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for step in report.steps:
        share = step.dropped / max(1, step.dropped + step.left)
        edited = f"{step.edited:,}" if step.edited else ""
        lines.append(
            f"| {step.name} | {step.dropped:,} | {share:.1%} | {step.left:,} | {edited} "
            f"| {step.says} |"
        )
    lines += ["", "```", *_bars([(step.name, step.left) for step in report.steps]), "```", ""]
    if report.masked:
        shown = ", ".join(f"{count:,} {name}" for name, count in sorted(report.masked.items()))
        lines += [f"Masked: {shown}.", ""]
    lines += ["## Lengths in characters", "", "```", *_lengths(report), "```", "", "## Examples"]
    for name, examples in sorted(report.examples.items()):
        lines += ["", f"### {name}", ""]
        for each in examples:
            where = f"{each.file}:{each.record}" + (f" ({each.id})" if each.id else "")
            lines.append(f"- `{where}`: {each.reason}")
            if each.text:
                lines.append(f"  > {' '.join(each.text.split())[:200]}")
    return "\n".join(lines) + "\n"


def _bars(rows: Sequence[tuple[str, int]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    most = max((count for _, count in rows), default=1) or 1
    return [
        f"{name.ljust(width)}  {count:>12,}  {'█' * -(-_BAR * count // most)}"
        for name, count in rows
    ]


def _lengths(report: PrepareReport) -> list[str]:
    """Documents by length, read and kept, on one scale."""
    bins = sorted({*report.lengths_read, *report.lengths_kept})
    rows = []
    for each in bins:
        below = f"< {1 << each:,}"
        rows.append((f"{below:>14}  read", report.lengths_read.get(each, 0)))
        rows.append((f"{below:>14}  kept", report.lengths_kept.get(each, 0)))
    return _bars(rows)
