"""Masks over what may name a person: mail addresses, IP addresses, what looks like telephones.

Patterns only: names, postal addresses, account numbers and whatever is written out are not found,
and a version or a serial number that looks like a telephone number is masked too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

MAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}\b"
)
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,5}\)[ .-]?)?"
    r"\d{2,5}(?:[ .-]\d{2,5}){1,4}(?![\w]|[.-]\d)"
)
LEAST_PHONE_DIGITS, MOST_PHONE_DIGITS = 9, 15  # E.164 allows 15; shorter ones are dates, years
_DATE = re.compile(r"\d{4}[ .-]\d{1,2}[ .-]\d{1,2}|\d{1,2}[ .-]\d{1,2}[ .-]\d{4}")

Masking = Callable[[str], tuple[str, int]]


def _replace(pattern: re.Pattern[str], name: str, meant: Callable[[str], bool]) -> Masking:
    """Puts ``<NAME>`` for every match that is meant; gives the text and how many there were."""

    def apply(text: str) -> tuple[str, int]:
        count = 0

        def one(match: re.Match[str]) -> str:
            nonlocal count
            if not meant(match[0]):
                return match[0]
            count += 1
            return f"<{name}>"

        return pattern.sub(one, text), count

    return apply


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)  # nobody's


def _is_phone(text: str) -> bool:
    digits = sum(map(str.isdigit, text))
    plain = _DATE.fullmatch(text) is None
    return plain and LEAST_PHONE_DIGITS <= digits <= MOST_PHONE_DIGITS


MASKS: dict[str, tuple[Masking, ...]] = {
    "email": (_replace(MAIL, "EMAIL", lambda match: True),),
    "ip": (_replace(IPV4, "IP", _is_address), _replace(IPV6, "IP", _is_address)),
    "phone": (_replace(PHONE, "PHONE", _is_phone),),
}


def mask(text: str, names: Sequence[str]) -> tuple[str, dict[str, int]]:
    """The text with what these masks cover, and how often each was needed."""
    counts: dict[str, int] = {}
    for name in names:
        for apply in MASKS[name]:
            text, count = apply(text)
            if count:
                counts[name] = counts.get(name, 0) + count
    return text, counts
