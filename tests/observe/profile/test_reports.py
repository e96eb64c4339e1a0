"""Comparison of two profiles, the page, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.observe.profile.advise import advise
from phalanx.observe.profile.compare import compare
from phalanx.observe.profile.pages import comparison_page, profile_page
from phalanx.observe.profile.profile import KernelTime, MemorySample, read_profile, write_profile
from phalanx.observe.profile.sections import sections
from tests.observe.profile.played import played_job, played_profile, times
from tests.observe.profile.test_rules import slow_loader

PRODUCT = KernelTime(
    name="nvjet<script>",
    kind="matmul",
    shapes="[4096, 1024] x [1024, 1024]",
    number_format="bfloat16",
    calls=4,
    seconds=0.06,
    flops=0.06 * 350e12,
    bytes=0.06 * 1e12,
)


def test_a_comparison_names_the_part_that_grew_and_what_is_different() -> None:
    before = played_profile()
    after = played_profile(
        played_job(data__prefetch=0),
        times=times(0.13),
        traced_seconds=0.13,
        kinds={**before.kinds, "data wait": 0.03},
        origin=structs.replace(before.origin, commit="b" * 40, host="n2"),
    )
    found = compare(before, after)
    assert found.verdict == "30.0% slower, most of it in data wait"
    assert [(fact.name, fact.before, fact.after) for fact in found.facts] == [
        ("host", "n1", "n2"),
        ("commit", "a" * 12, "b" * 12),
        ("data.prefetch", "4", "0"),
    ]
    (grown,) = found.kinds
    assert (grown.part, grown.seconds) == ("data wait", pytest.approx(0.03))
    assert compare(after, before).verdict == "23.1% faster, most of it in data wait"


def test_two_runs_of_the_same_are_as_fast() -> None:
    one, two = played_profile(), played_profile(times=times(0.101))
    assert compare(one, two).verdict.startswith("as fast as before (+1.0%")
    assert compare(one, two).facts == []


def test_tracing_s_own_time_is_no_change() -> None:
    """A traced step is longer than an undisturbed one, and not always by as much."""
    plain = played_profile()
    slow = played_profile(
        traced_seconds=0.2, kinds={kind: 2 * value for kind, value in plain.kinds.items()}
    )
    assert compare(plain, slow).kinds == []


def test_the_page_needs_nothing_and_holds_no_markup_of_others() -> None:
    profile = structs.replace(
        slow_loader(),
        kernels=[PRODUCT],
        memory_line=[MemorySample(0.0, 1 << 30, 2 << 30), MemorySample(0.1, 2 << 30, 2 << 30)],
    )
    page = profile_page(profile, advise(profile))
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "nvjet&lt;script&gt;" in page
    for words in ("slow loader", "--set data.prefetch=8", "measured</text>", "<circle", "2 GiB"):
        assert words in page
    assert "30.0% slower" not in page
    assert "faster" in comparison_page("a", compare(profile, played_profile(times=times(0.05))))


def test_a_kernel_stands_under_the_nearer_roof() -> None:
    rates = played_profile().rates
    assert PRODUCT.roof(rates) == pytest.approx(0.5)  # of 700 TFLOP/s
    moving = structs.replace(PRODUCT, flops=0.0, bytes=0.06 * 3e12)
    assert moving.roof(rates) == pytest.approx(0.75)  # of 4 TB/s


def test_sections_tell_the_same_as_the_profile() -> None:
    titles = [each.title for each in sections(slow_loader(), [])]
    assert titles[:3] == ["What to change, by expected gain", "The step", "Where a step goes"]
    shares = sections(slow_loader(), [])[2].bars
    assert shares == {"matmul": pytest.approx(0.7), "data wait": pytest.approx(0.3)}


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = structs.replace(slow_loader(), kernels=[PRODUCT])
    assert read_profile(write_profile(profile, tmp_path)) == read_profile(tmp_path)
    assert compare(read_profile(tmp_path), profile).facts == []


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_profile(tmp_path / "none")
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(ValueError, match="no profile"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"traced_seconds": 0.0}, "took no time"),
        ({"times": times(0.0)}, "took no time"),
        ({"times": times(-1.0)}, "took no time"),
        ({"version": 2}, "version 2"),
    ],
)
def test_a_profile_that_nothing_can_be_compared_with_is_refused(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    write_profile(played_profile(**fields), tmp_path)
    with pytest.raises(ValueError, match=said):
        read_profile(tmp_path)
