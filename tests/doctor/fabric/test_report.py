"""What a report says is wrong, which way bytes went, and the picture of it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec import structs

from phalanx.cli.operate.fabric import show_report
from phalanx.cluster.fabric.verdict import (
    MOST_FINDINGS,
    MOST_TEXT,
    FabricFinding,
    FabricVerdict,
    decode_verdict,
)
from phalanx.cluster.protocol.message_rights import MOST_TEXT as RESULT_BYTES
from phalanx.config import ConfigError
from phalanx.doctor.fabric.counters import Counters, read_counters, transport_of
from phalanx.doctor.fabric.explain import Part, PartKind
from phalanx.doctor.fabric.picture import html, picture, svg, terminal_rows
from phalanx.doctor.fabric.report import (
    REPORT_MARK,
    FabricReport,
    PairRate,
    SweepRow,
    Transport,
    all_clear,
    find_report,
    floor_of,
    part_in_words,
    problems_of,
    verdict_of,
)
from phalanx.doctor.fabric.search import SearchOutcome, Slowness
from phalanx.doctor.fabric.sweep import bus_factor, sizes

NAMES = ["a", "b", "<c>"]
SLOW = Slowness(part=Part(kind=PartKind.NODE, nodes=(2,)), level=0.5, measurements=5)
OUTCOME = SearchOutcome(
    accused=(SLOW,),
    undecided=(),
    usual={"leaf": 40e9},
    noise=0.01,
    boundary=0.95,
    rounds=6,
    slots=8,
)


def pair(first: str, second: str, level: float, rail: int = 0) -> PairRate:
    return PairRate(
        first=first,
        second=second,
        rail=rail,
        bytes_per_second=level * 40e9,
        latency_seconds=5e-6,
        level=level,
    )


REPORT = FabricReport(
    backend="nccl",
    nodes=NAMES,
    rails=2,
    pairs=[pair("a", "b", 1.0), pair("a", "<c>", 0.9), pair("a", "<c>", 0.5, rail=1)],
    outcome=OUTCOME,
    sweep=[SweepRow(collective="all_reduce", bytes=8 << 20, seconds=1e-3, algbw=8e9, busbw=12e9)],
    transports=[],
    seconds=3.0,
)


def test_a_slow_part_is_named_with_its_node_and_its_level() -> None:
    problems = problems_of(REPORT)
    assert [one.nodes for one in problems] == [("<c>",)]
    assert "node <c>" in problems[0].text and "50% of the usual rate" in problems[0].text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(kind=PartKind.RAIL, rail=3), "rail 3 of all nodes"),
        (Part(kind=PartKind.UPLINK, leaf="l7"), "leaf switch l7"),
        (Part(kind=PartKind.PORT, nodes=(1,), rail=1), "node b on rail 1"),
        (Part(kind=PartKind.PATH, nodes=(0, 1)), "between a and b:"),
        (Part(kind=PartKind.PATH, nodes=(0, 1), rail=1), "between a and b on rail 1"),
    ],
)
def test_every_part_has_words(part: Part, words: str) -> None:
    assert words in part_in_words(part, NAMES)


def test_what_is_slow_everywhere_is_below_the_floor_of_the_catalogue() -> None:
    well = structs.replace(REPORT, outcome=structs.replace(OUTCOME, accused=()))
    assert problems_of(well) == []
    texts = [one.text for one in problems_of(well, "ndr")]
    assert 35e9 < floor_of("ndr") < 50e9 * 0.8
    assert len(texts) == 1 and "all_reduce" in texts[0]  # 12 of 2 rails' 80 GB/s; pairs reach 40
    assert len(problems_of(well, "xdr")) == 2
    with pytest.raises(ConfigError, match="no card of the catalogue"):
        problems_of(well, "token-ring")


def test_the_report_is_found_among_other_lines() -> None:
    text = msgspec.json.encode(REPORT)
    output = b"NCCL INFO something\n" + REPORT_MARK.encode() + text + b"\nbye\n"
    assert find_report(output) == REPORT
    assert find_report(b"round 1: 0 open suspects\n") is None


def kernel(root: Path, *, words: int, eth: int, lo: int, registered: int | None) -> Counters:
    """The counters of a played kernel with one RDMA port."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    peers = root / "sys/kernel/mm/memory_peers/nv_mem"
    for folder in (port, peers, root / "proc/net"):
        folder.mkdir(parents=True, exist_ok=True)
    (port / "port_xmit_data").write_text(f"{words}\n")
    if registered is not None:
        (peers / "num_alloc_mrs").write_text(f"{registered}\n")
    rows = "".join(
        f"  {name}: 1 2 0 0 0 0 0 0 {sent} 9 0 0 0 0 0 0\n"
        for name, sent in (("lo", lo), ("eth0", eth))
    )
    (root / "proc/net/dev").write_text(f"Inter-|\n face |\n{rows}")
    return read_counters(root)


def test_bytes_that_went_by_rdma_are_seen_in_the_ports_counters(tmp_path: Path) -> None:
    before = kernel(tmp_path, words=1000, eth=5, lo=7, registered=2)
    after = kernel(tmp_path, words=1000 + 250_000, eth=900, lo=7, registered=4)
    found = transport_of("a", before, after, 1_000_000, gpus=True)
    assert (found.path, found.rdma_bytes, found.socket_bytes) == ("rdma", 1_000_000, 895)
    assert found.gpu_direct == "used"
    assert transport_of("a", before, after, 1_000_000, gpus=False).gpu_direct == "none"


def test_sockets_in_spite_of_rdma_cards_are_a_problem(tmp_path: Path) -> None:
    before = kernel(tmp_path, words=0, eth=0, lo=0, registered=None)
    after = kernel(tmp_path, words=10, eth=1_100_000, lo=0, registered=None)
    found = transport_of("a", before, after, 1_000_000, gpus=True)
    assert (found.path, found.gpu_direct) == ("sockets", "unknown")
    report = structs.replace(REPORT, outcome=None, transports=[found])
    assert "through sockets" in problems_of(report)[0].text


def test_without_counters_the_way_is_unknown(tmp_path: Path) -> None:
    none = read_counters(tmp_path)
    assert none == Counters()
    found = transport_of("a", none, none, 1_000_000, gpus=True)
    assert (found.path, found.gpu_direct, found.rdma_bytes) == ("unknown", "unknown", -1)
    report = structs.replace(REPORT, outcome=None, transports=[found])
    assert problems_of(report) == []


def test_the_picture_has_a_cell_for_both_ways_of_each_pair_and_the_worst_rail() -> None:
    root = ElementTree.fromstring(svg(REPORT))
    cells = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(cells) == 4
    titles = [cell[0].text or "" for cell in cells]
    assert sum("rail 1: 50% of usual" in title for title in titles) == 2
    page = html(REPORT, problems_of(REPORT))
    assert "&lt;c&gt;" in page and "<c>" not in page and "all_reduce" in page
    assert picture("x.svg", REPORT, []) == svg(REPORT)


def test_the_terminal_shows_percents_and_what_was_not_measured() -> None:
    rows = [[text.strip() for text, _ in row] for row in terminal_rows(REPORT)]
    assert rows == [["a", ".", "100", "50"], ["b", "100", ".", "--"], ["<c>", "50", "--", "."]]
    assert dict(next(iter(terminal_rows(REPORT))))["  50"] == "red"


def test_a_sweep_goes_from_eight_bytes_to_eight_gigabytes() -> None:
    assert sizes(8 << 30)[0] == 8 and sizes(8 << 30)[-1] == 8 << 30
    assert sizes(1 << 20)[-1] <= 1 << 20
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_a_report_is_shown_with_its_map_its_rates_and_what_is_slow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_report(REPORT, problems_of(REPORT))
    shown = capsys.readouterr().out
    assert "6 rounds, 8 slots" in shown and "12 GB/s busbw" in shown
    assert "SLOW  node <c>" in shown and "nothing is slow" not in shown


def test_no_more_is_cleared_than_could_have_been_seen() -> None:
    assert REPORT.outcome is not None
    quiet = structs.replace(REPORT.outcome, accused=(), boundary=0.9)
    loud = structs.replace(quiet, boundary=-0.6)
    assert all_clear(structs.replace(REPORT, outcome=quiet)) == "nothing is slow by 10% or more"
    said = all_clear(structs.replace(REPORT, outcome=loud))
    assert "nothing could be told" in said and said in html(
        structs.replace(REPORT, outcome=loud), []
    )


def test_a_verdict_says_what_is_slow_or_that_nothing_could_be_told() -> None:
    verdict = verdict_of(REPORT)
    assert [one.nodes for one in verdict.findings] == [("<c>",)] and not verdict.unclear
    assert REPORT.outcome is not None
    loud = structs.replace(REPORT.outcome, accused=(), boundary=-0.6)
    assert "nothing could be told" in verdict_of(structs.replace(REPORT, outcome=loud)).unclear
    assert decode_verdict(msgspec.json.encode(verdict).decode()) == verdict


def test_a_verdict_of_very_many_findings_still_fits_into_a_result() -> None:
    sent = [
        Transport(node=f"n{n}", path="sockets", sent_bytes=1, rdma_bytes=0) for n in range(5000)
    ]
    verdict = verdict_of(structs.replace(REPORT, transports=sent))
    assert verdict.findings[0].nodes == ("<c>",)  # what was measured comes first
    assert len(msgspec.json.encode(verdict)) < RESULT_BYTES


def test_a_verdict_that_a_node_made_up_is_cut_to_what_people_read() -> None:
    findings = tuple(FabricFinding(text="\x1b[31m" + "x" * 9999) for _ in range(99))
    cut = decode_verdict(msgspec.json.encode(FabricVerdict(findings=findings)).decode())
    assert len(cut.findings) == MOST_FINDINGS
    assert all(len(one.text) < MOST_TEXT and one.text.isprintable() for one in cut.findings)


def test_a_port_that_counts_nothing_ends_no_measurement(tmp_path: Path) -> None:
    """Cards without a PMA say so instead of a number, or refuse to be read."""
    kernel(tmp_path, words=100, eth=1, lo=1, registered=None)
    ports = tmp_path / "sys/class/infiniband"
    for name in ("efa_0", "usnic_0"):
        (ports / name / "ports/1/counters").mkdir(parents=True)
    (ports / "efa_0/ports/1/counters/port_xmit_data").write_text("N/A (no PMA)\n")
    (ports / "usnic_0/ports/1/counters/port_xmit_data").mkdir()  # reading it is an error
    assert read_counters(tmp_path).rdma == 400
    (ports / "mlx5_0/ports/1/counters/port_xmit_data").write_text("N/A (no PMA)\n")
    assert read_counters(tmp_path).rdma is None
    (tmp_path / "proc/net/dev").write_text("Inter-|\n face |\n  lo: 1 2\n garbage\n")
    assert read_counters(tmp_path).loopback is None
