"""Masks cover what they are for, and leave what only resembles it."""

from __future__ import annotations

import pytest

from phalanx.data.prepare.masks import mask

ALL = ("email", "ip", "phone")


@pytest.mark.parametrize(
    ("text", "masked", "counts"),
    [
        ("write to a.b+c@mail.example.org!", "write to <EMAIL>!", {"email": 1}),
        ("a@b.co, c@d.co", "<EMAIL>, <EMAIL>", {"email": 2}),
        ("not@mail and @handle and a@b", "not@mail and @handle and a@b", {}),
        ("at 8.8.8.8 now.", "at <IP> now.", {"ip": 1}),
        ("version 1.2.3.4.5 or 300.1.1.1", "version 1.2.3.4.5 or 300.1.1.1", {}),
        ("localhost 127.0.0.1", "localhost 127.0.0.1", {}),
        ("2001:db8:0:0:0:0:0:1 and ::1", "<IP> and ::1", {"ip": 1}),
        ("call +49 30 1234 5678.", "call <PHONE>.", {"phone": 1}),
        ("call (030) 1234-5678 or 555-123-4567", "call <PHONE> or <PHONE>", {"phone": 2}),
        ("on 2024-05-17 and 17.05.2024", "on 2024-05-17 and 17.05.2024", {}),
        ("in 1999-2000, 3.14, 12 345", "in 1999-2000, 3.14, 12 345", {}),
        ("nothing", "nothing", {}),
    ],
)
def test_what_is_masked(text: str, masked: str, counts: dict[str, int]) -> None:
    assert mask(text, ALL) == (masked, counts)


def test_only_the_masks_that_were_asked_for_are_laid() -> None:
    assert mask("a@b.co 8.8.8.8", ["ip"]) == ("a@b.co <IP>", {"ip": 1})


def test_a_long_hostile_text_is_no_trap() -> None:
    """Patterns take time in proportion to the text; a quadratic one would end here by a timeout."""
    for text in ("a" * 200_000, "1 " * 100_000, "a." * 100_000, "1.1." * 50_000, "a@" * 100_000):
        assert mask(text, ALL)[0]
