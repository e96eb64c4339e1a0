"""The tables that ``phalanx plan`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.tables import counted
from phalanx.plan.cost.failures import DAY_SECONDS, LEAST_RECOVERY_SECONDS, FailureOutlook
from phalanx.plan.cost.money import Range
from phalanx.plan.cost.predict import Prediction
from phalanx.plan.question.quantities import duration, energy, mass, short, size
from phalanx.plan.search.behind import EvidenceBehind
from phalanx.plan.search.explain import WORDS, Explanation, PlanChange
from phalanx.plan.search.proposal import PlanProposal, describe, idle_sentence, not_run
from phalanx.plan.search.search import MappingCandidate
from phalanx.plan.workload import Mapping

BAR = 24  # columns


def console() -> Console:
    """Where tables go: as wide as the terminal."""
    return Console(highlight=False)


def table(title: str, *headings: str, left: int = 1) -> Table:
    """A plain table; the first ``left`` columns are text, the others numbers."""
    made = Table(title=title, box=SIMPLE, title_justify="left", pad_edge=False)
    for position, heading in enumerate(headings):
        made.add_column(heading, justify="left" if position < left else "right")
    return made


def print_proposal(proposal: PlanProposal) -> None:
    """A plan: what to run, how fast, how safe, how dear; and the next best."""
    out = console()
    made = table(_title(proposal), "", "", left=2)
    made.show_header = False
    for name, text in _facts(proposal):
        made.add_row(f"[bold]{name}[/bold]", escape(text))
    out.print(made)
    out.print(_waterfall(proposal.prediction.parts, "Where a step goes"))
    out.print(_alternatives(proposal.alternatives, proposal.prediction))
    if proposal.assumed:
        out.print(escape("assumed: " + "; ".join(proposal.assumed)))
    refused = not_run(proposal)
    if refused:
        out.print(f"[yellow]phalanx train does not run this plan[/yellow]: {escape(refused)}")
    out.print(
        f"{proposal.considered:,} mappings searched in {proposal.search_seconds:.2f} s, "
        f"{proposal.priced:,} priced in full"
    )


def _title(proposal: PlanProposal) -> str:
    on = proposal.cluster
    return (
        f"{escape(proposal.model)} ({short(proposal.parameters)} parameters) on "
        f"{escape(on.name)}: {proposal.gpus:,} x {on.gpu.name}, {short(proposal.tokens)} tokens"
    )


def _facts(proposal: PlanProposal) -> Iterable[tuple[str, str]]:
    prediction, ahead, cost = proposal.prediction, proposal.failures, proposal.bill
    low, high = prediction.step_seconds_low, prediction.step_seconds_high
    yield "mapping", describe(prediction.mapping)
    if proposal.idle is not None:
        yield "idle", idle_sentence(proposal)
    yield "step", f"{prediction.step_seconds:.3g} s (80 %: {low:.3g} to {high:.3g})"
    yield (
        "speed",
        f"{short(prediction.tokens_per_second)} tok/s, "
        f"{prediction.tokens_per_second_per_gpu:,.0f} a GPU, MFU {prediction.mfu:.1%}",
    )
    yield "memory", _memory(prediction)
    yield (
        "failures",
        f"one every {duration(ahead.mtbf_seconds)} ({ahead.rate.name}: "
        f"{ahead.rate.per_1000_node_days:.2f} per 1000 node-days), "
        f"{duration(ahead.detection_seconds + ahead.recovery_seconds)} to recover",
    )
    yield (
        "checkpoint",
        f"every {duration(ahead.interval_seconds)} ({counted(proposal.checkpoint_steps, 'step')}), "
        f"{size(ahead.checkpoint_bytes)} in {duration(ahead.flush_seconds)}",
    )
    yield "goodput", _goodput(ahead)
    yield (
        "spares",
        "; ".join(
            f"{row.spares} beside {row.units:,} ({row.domain}), {row.gpus} GPUs"
            for row in ahead.spares
        ),
    )
    least, mid, most = (duration(days * DAY_SECONDS) for days in structs.astuple(cost.days))
    yield "time", f"{mid} ({least} to {most})"
    yield (
        "cost",
        f"{_range(cost.dollars, '$')}, {short(cost.gpu_hours.mid)} GPU-hours at "
        f"${proposal.cluster.price_per_gpu_hour:.2f}, "
        f"${cost.dollars_per_million_tokens:.3g} per million tokens",
    )
    used, emitted = energy(cost.megawatt_hours.mid), mass(cost.tonnes_co2.mid)
    yield "energy", f"{used}, {emitted} of CO2"


def _goodput(ahead: FailureOutlook) -> str:
    text = f"{ahead.goodput:.1%} ({ahead.goodput_low:.1%} to {ahead.goodput_high:.1%})"
    if ahead.goodput_fast - ahead.goodput > 0.05:
        fast = duration(LEAST_RECOVERY_SECONDS)
        text += f"; {ahead.goodput_fast:.1%} if a failure cost {fast} (--recovery-seconds)"
    return text


def _range(value: Range, unit: str = "") -> str:
    return f"{unit}{short(value.mid)} ({short(value.low)} to {short(value.high)})"


def _memory(prediction: Prediction) -> str:
    fullest = max(prediction.memory, key=lambda stage: stage.total_bytes)
    parts = (
        ("weights", fullest.weight_bytes),
        ("gradients", fullest.gradient_bytes),
        ("optimizer", fullest.optimizer_bytes),
        ("activations", fullest.activation_bytes),
        ("working", fullest.working_bytes),
        ("libraries", fullest.library_bytes),
    )
    rest = fullest.total_bytes - sum(count for _, count in parts)
    contents = ", ".join(
        f"{name} {count / 2**30:.1f}" for name, count in (*parts, ("fragments", rest))
    )
    text = (
        f"{prediction.memory_bytes / 2**30:.1f} of {prediction.memory_limit / 2**30:.0f} GiB, "
        f"{prediction.memory_margin:.0%} free ({contents}); "
        f"{prediction.allocated_bytes / 2**30:.1f} allocated, "
        f"{prediction.reserved_bytes / 2**30:.1f} reserved, "
        f"{prediction.needed_bytes / 2**30:.1f} at least"
    )
    for memory_name, count, limit in (
        ("host memory", prediction.host_bytes, prediction.host_limit),
        ("NVMe", prediction.nvme_bytes, prediction.nvme_limit),
    ):
        if count:
            text += f"; {size(count)} of {size(limit)} a GPU in {memory_name}"
    return text


def _waterfall(parts: dict[str, float], title: str) -> Table:
    made = table(title, "", "seconds", "share", "")
    made.columns[3].justify = "left"
    total, start = sum(parts.values()), 0.0
    for name in (*WORDS, *(name for name in parts if name not in WORDS)):
        seconds = parts.get(name, 0.0)
        if seconds <= 0:
            continue
        first, last = round(start / total * BAR), round((start + seconds) / total * BAR)
        bar = " " * first + ("█" * (last - first) or "▏")
        made.add_row(WORDS.get(name, name), f"{seconds:.3f}", f"{seconds / total:.1%}", bar)
        start += seconds
    made.add_row("[bold]step[/bold]", f"{total:.3f}", "100.0%", "")
    return made


def _alternatives(candidates: Sequence[MappingCandidate], best: Prediction) -> Table:
    made = table("Next best", "mapping", "step", "slower", "GiB")
    # Mappings that differ in a detail alone say nothing new: the first of each division.
    seen = {_division(best.mapping)}
    for candidate in candidates:
        if _division(candidate.mapping) in seen:
            continue
        seen.add(_division(candidate.mapping))
        made.add_row(
            escape(describe(candidate.mapping)),
            f"{candidate.step_seconds:.3g} s",
            f"{candidate.step_seconds / best.step_seconds - 1:+.1%}",
            f"{candidate.memory_bytes / 2**30:.1f}",
        )
    return made


def _division(mapping: Mapping) -> tuple[object, ...]:
    return (
        mapping.tensor,
        mapping.pipeline,
        mapping.context,
        mapping.expert,
        mapping.schedule,
        mapping.recompute,
    )


def print_explanation(proposal: PlanProposal, explanation: Explanation) -> None:
    """Why the step takes so long, stage by stage, and what would help most."""
    out = console()
    prediction = proposal.prediction
    out.print(f"[bold]{_title(proposal)}[/bold]\n{escape(describe(prediction.mapping))}\n")
    if proposal.idle is not None:
        out.print(escape(f"idle: {idle_sentence(proposal)}\n"))
    out.print(_waterfall(explanation.waterfall, "Where a step goes"))
    out.print(
        f"bound by {explanation.bound_by}; the largest loss is {explanation.loss}, "
        f"{explanation.loss_share:.1%} of a step\n"
    )
    less = explanation.less_recompute
    if less is not None:
        limit = prediction.memory_limit / 2**30
        out.print(
            f"with recompute {less.recompute} this mapping would need "
            f"{less.memory_bytes / 2**30:.0f} of {limit:.0f} GiB; `--recompute {less.recompute}` "
            "plans the best that fits with it\n"
        )
    out.print(_changes(explanation.changes))
    out.print(_traffic(proposal))
    out.print(_stages(prediction))
    out.print(_evidence(explanation.evidence))


def _evidence(rows: Sequence[EvidenceBehind]) -> Table:
    made = table("Measured runs behind it", "", "runs", "must win by")
    for row in rows:
        made.add_row(escape(row.what), f"{row.runs:,}", f"{row.margin:.1%}" if row.margin else "")
    return made


def _changes(changes: Sequence[PlanChange]) -> Table:
    made = table("What would help most", "change", "kind", "faster", "GiB", left=2)
    for change in changes:
        memory = f"{change.memory_bytes / 2**30:.1f}"
        made.add_row(escape(change.what), change.kind, f"{change.gain:+.1%}", memory)
    return made


def _traffic(proposal: PlanProposal) -> Table:
    headings = ("axis", "over", "ranks", "within", "sent", "at line rate")
    made = table("What a GPU sends in a step", *headings, left=2)
    for row in proposal.traffic:
        made.add_row(
            row.axis,
            "NVLink" if row.inside_domain else "network",
            f"{row.ranks:,}",
            f"{row.span:,} GPUs",
            size(row.sent_bytes),
            duration(row.line_seconds(proposal.cluster)),
        )
    return made


def _stages(prediction: Prediction) -> Table:
    headings = ("layers", "weights", "grads", "optimizer", "activ.", "working", "total")
    made = table("Memory of a rank at each pipeline position, GiB", "position", *headings)
    groups: dict[tuple[float, ...], list[int]] = {}
    for stage in prediction.memory:
        row = (
            stage.weight_bytes,
            stage.gradient_bytes,
            stage.optimizer_bytes,
            stage.activation_bytes,
            stage.working_bytes,
            stage.total_bytes,
        )
        groups.setdefault((stage.layers, *row), []).append(stage.position)
    for (layers, *sizes), positions in groups.items():
        where = f"{positions[0]}-{positions[-1]}" if len(positions) > 1 else f"{positions[0]}"
        made.add_row(where, f"{layers:.0f}", *(f"{count / 2**30:.1f}" for count in sizes))
    return made


def print_comparison(sides: Sequence[tuple[str, PlanProposal]]) -> None:
    """Two plans, fact by fact and part by part."""
    out = console()
    made = table("", "", *(escape(name) for name, _ in sides), "change", left=1)
    first, second = (proposal for _, proposal in sides)
    for (name, one), (_, other) in zip(_figures(first), _figures(second), strict=True):
        if not one[0] and not other[0]:
            continue
        change = f"{other[0] / one[0] - 1:+.1%}" if one[0] and other[0] else ""
        made.add_row(name, one[1], other[1], change)
    out.print(made)
    for name, proposal in sides:
        out.print(escape(f"{name}: {describe(proposal.prediction.mapping)}"))


def _figures(proposal: PlanProposal) -> list[tuple[str, tuple[float, str]]]:
    prediction, cost, ahead = proposal.prediction, proposal.bill, proposal.failures
    rows: list[tuple[str, tuple[float, str]]] = [
        ("GPUs", (proposal.gpus, f"{proposal.gpus:,}")),
        ("step", (prediction.step_seconds, f"{prediction.step_seconds:.3g} s")),
        ("tokens/s", (prediction.tokens_per_second, short(prediction.tokens_per_second))),
        ("MFU", (prediction.mfu, f"{prediction.mfu:.1%}")),
        ("memory", (prediction.memory_bytes, f"{prediction.memory_bytes / 2**30:.1f} GiB")),
        ("goodput", (ahead.goodput, f"{ahead.goodput:.1%}")),
        ("days", (cost.days.mid, f"{cost.days.mid:,.3g}")),
        ("dollars", (cost.dollars.mid, f"${short(cost.dollars.mid)}")),
        ("CO2", (cost.tonnes_co2.mid, mass(cost.tonnes_co2.mid))),
    ]
    for name, words in WORDS.items():
        seconds = prediction.parts.get(name, 0.0)
        rows.append((words, (seconds, f"{seconds:.3f} s")))
    return rows


def print_sweep(proposals: Sequence[PlanProposal], failed: Sequence[tuple[int, str]]) -> None:
    """A scaling curve: one line a number of GPUs."""
    out = console()
    first = proposals[0].prediction if proposals else None
    made = table(
        _title(proposals[-1]).split(" on ")[0] if proposals else "",
        *("GPUs", "mapping", "tok/s", "a GPU", "MFU", "goodput", "days", "dollars"),
        left=0,
    )
    made.columns[1].justify = "left"
    for proposal in proposals:
        prediction = proposal.prediction
        assert first is not None
        whole = proposal.gpus + (proposal.idle.gpus if proposal.idle else 0)
        share = prediction.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu
        made.add_row(
            f"{proposal.gpus:,}" + (f" of {whole:,}" if whole > proposal.gpus else ""),
            escape(_axes(proposal)),
            short(prediction.tokens_per_second),
            f"{share:.0%}",
            f"{prediction.mfu:.1%}",
            f"{proposal.failures.goodput:.1%}",
            f"{proposal.bill.days.mid:,.3g}",
            f"${short(proposal.bill.dollars.mid)}",
        )
    out.print(made)
    for gpus, reason in failed:
        out.print(escape(f"{gpus:,} GPUs: {reason}"))


def _axes(proposal: PlanProposal) -> str:
    mapping = proposal.prediction.mapping
    short_names = (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"), ("context", "cp"))
    axes = [f"{name}{getattr(mapping, axis)}" for axis, name in short_names]
    return " ".join([*axes, *([f"ep{mapping.expert}"] if mapping.expert > 1 else [])])
