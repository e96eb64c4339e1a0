"""The heat map of pairs: what each reaches of the usual rate, for a terminal and as SVG or HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from phalanx.doctor.fabric.report import FabricProblem, FabricReport, PairRate, all_clear

GOOD, FAIR = 0.95, 0.8  # levels
COLOURS = {"green": "#3a9d5d", "yellow": "#e0b03a", "red": "#c8402f"}
MOST_IN_TERMINAL = 40  # nodes
CELL, MARGIN = 14, 120  # pixels
STYLE = "body{font:14px sans-serif}table{border-collapse:collapse}td,th{padding:2px 10px}"


def colour_of(level: float) -> str:
    """The colour of a pair."""
    return "green" if level >= GOOD else "yellow" if level >= FAIR else "red"


def worst_pairs(report: FabricReport) -> dict[tuple[int, int], PairRate]:
    """By numbers of nodes, the rail that reaches least."""
    numbers = {name: number for number, name in enumerate(report.nodes)}
    worst: dict[tuple[int, int], PairRate] = {}
    for pair in report.pairs:
        key = (numbers[pair.first], numbers[pair.second])
        if key not in worst or pair.level < worst[key].level:
            worst[key] = pair
    return worst


def terminal_rows(report: FabricReport) -> Iterator[list[tuple[str, str]]]:
    """Rows of texts and their colours: percent of the usual rate, ``--`` where not measured."""
    worst, count = worst_pairs(report), len(report.nodes)
    width = max(map(len, report.nodes), default=0)
    for row, name in enumerate(report.nodes):
        cells = [(f"{name:>{width}} ", "")]
        for column in range(count):
            pair = worst.get((min(row, column), max(row, column)))
            if row == column:
                cells.append(("   .", ""))
            elif pair is None:
                cells.append(("  --", ""))
            else:
                cells.append((f"{100 * pair.level:4.0f}", colour_of(pair.level)))
        yield cells


def svg(report: FabricReport) -> str:
    """The heat map as a picture; a cell says its figures where the mouse is."""
    names, side = report.nodes, MARGIN + CELL * len(report.nodes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" '
        f'viewBox="0 0 {side} {side}" font-family="sans-serif" font-size="{CELL - 4}">'
    ]
    for number, name in enumerate(names):
        at = MARGIN + CELL * number + CELL - 4
        shown = escape(name)
        parts.append(f'<text x="{MARGIN - 4}" y="{at}" text-anchor="end">{shown}</text>')
        parts.append(f'<text transform="translate({at} {MARGIN - 4}) rotate(-90)">{shown}</text>')
    for (first, second), pair in worst_pairs(report).items():
        title = (
            f"{pair.first} - {pair.second}, rail {pair.rail}: {pair.level:.0%} of usual, "
            f"{pair.bytes_per_second / 1e9:.3g} GB/s, {pair.latency_seconds * 1e6:.3g} us"
        )
        for row, column in ((first, second), (second, first)):
            parts.append(
                f'<rect x="{MARGIN + CELL * column}" y="{MARGIN + CELL * row}" '
                f'width="{CELL - 1}" height="{CELL - 1}" '
                f'fill="{COLOURS[colour_of(pair.level)]}"><title>{escape(title)}</title></rect>'
            )
    return "\n".join([*parts, "</svg>\n"])


def html(report: FabricReport, problems: list[FabricProblem]) -> str:
    """The heat map, what is wrong, and the collectives, on one page."""
    rows = "".join(
        f"<tr><td>{row.collective}</td><td>{row.bytes}</td><td>{row.seconds * 1e6:.4g}</td>"
        f"<td>{row.algbw / 1e9:.4g}</td><td>{row.busbw / 1e9:.4g}</td>"
        f"<td>{escape(row.problem)}</td></tr>"
        for row in report.sweep
    )
    texts = [one.text for one in problems] or [all_clear(report)]
    said = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return (
        f'<!doctype html><meta charset="utf-8"><title>Fabric</title><style>{STYLE}</style>'
        f"<h1>Fabric of {len(report.nodes)} nodes, {report.rails} rails ({report.backend})</h1>"
        f"<h2>What is wrong</h2><ul>{said}</ul>"
        f"<h2>Pairs, of the usual rate</h2>{svg(report)}"
        "<h2>Collectives</h2><table><tr><th>collective<th>bytes<th>us<th>algbw GB/s<th>busbw GB/s"
        f"<th></tr>{rows}</table>\n"
    )


def picture(name: str, report: FabricReport, problems: list[FabricProblem]) -> str:
    """What a file of this name should have."""
    return svg(report) if name.endswith(".svg") else html(report, problems)
