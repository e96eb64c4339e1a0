"""A profile and a comparison as one HTML file: no script, no network, pictures as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.observe.profile.advice import Advice
from phalanx.observe.profile.compare import ProfileComparison
from phalanx.observe.profile.pictures import memory_line, roofline
from phalanx.observe.profile.profile import JobProfile
from phalanx.observe.profile.sections import MEMORY, ROOFLINE, comparison_sections, sections
from phalanx.observe.tracker.report_pages import page, section_html


def profile_page(profile: JobProfile, advice: Sequence[Advice]) -> str:
    """The report of a profile."""
    pictures = {ROOFLINE: roofline(profile), MEMORY: memory_line(profile)}
    parts = [section_html(each, pictures.get(each.title, "")) for each in sections(profile, advice)]
    return page(f"Profile of {profile.name}, {profile.origin.created[:16]}", parts)


def comparison_page(title: str, found: ProfileComparison) -> str:
    """The report of a comparison."""
    return page(title, [section_html(each) for each in comparison_sections(found)])
