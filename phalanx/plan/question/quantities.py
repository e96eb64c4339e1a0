"""Numbers as people write them (``15T``, ``4M``, ``8k``), in and out."""

from __future__ import annotations

import math
import re

from phalanx.config import ConfigError

UNITS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4, "p": 5}  # powers of a thousand


def quantity(
    text: str, key: str, least: float = 1, most: float = 1e18, binary: bool = False
) -> int:
    """The whole number that a text means; anything else, or out of bounds, is refused.

    ``binary``: sequences and batches, whose "k" is 1024.
    """
    match = re.fullmatch(
        r"\s*(\d[\d_,]*(?:\.\d+)?(?:e[+]?\d{1,2})?)\s*([kmbgtp]?)\s*", text.lower()
    )
    if match is None:
        raise ConfigError(key, text, "must be a positive number", "e.g. 15T, 500B, 4M or 8192")
    unit = math.pow(1024 if binary else 1000, UNITS[match[2]])
    number = float(match[1].replace("_", "").replace(",", "")) * unit
    if not least <= number <= most:
        rule = f"must be between {_written(least, binary)} and {_written(most, binary)}"
        raise ConfigError(key, text, rule, f"try {_written(min(max(number, least), most), binary)}")
    return round(number)


def _written(number: float, binary: bool) -> str:
    """A bound as it can be typed: read again it is the same."""
    if not binary:
        return short(number)
    for letter in ("T", "G", "M", "k"):
        unit = 1024 ** UNITS[letter.lower()]
        if number >= unit and number % unit == 0:
            return f"{number / unit:.0f}{letter}"
    return f"{number:.0f}"


def short(number: float) -> str:
    """Three digits and a letter: ``6.6M``, ``15T``."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * unit:
            # Beyond the last letter digits are counted out: %g would give 1e+03.
            digits = ".3g" if abs(number) < 999.5 * unit else ".0f"
            return f"{number / unit:{digits}}{letter}"
    return f"{number:.3g}"


def size(number_of_bytes: float) -> str:
    """Bytes in decimal units: ``16.0 TB``."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number_of_bytes) >= unit:
            return f"{number_of_bytes / unit:.1f} {name}"
    return f"{number_of_bytes:.0f} B"


def energy(megawatt_hours: float) -> str:
    """Megawatt-hours in the unit that a person would choose: ``32.5 kWh``, ``3.24 MWh``."""
    for unit, name in ((1e3, "GWh"), (1.0, "MWh")):
        if megawatt_hours >= unit:
            return f"{megawatt_hours / unit:.3g} {name}"
    return f"{megawatt_hours * 1e3:.3g} kWh"


def mass(tonnes: float) -> str:
    """Tonnes, or kilograms where it is less than one: ``11,177 t``, ``12.7 kg``."""
    if tonnes >= 100:
        return f"{tonnes:,.0f} t"
    return f"{tonnes:.3g} t" if tonnes >= 1 else f"{tonnes * 1e3:.3g} kg"


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would choose: ``3.1 h``, ``14 min``, ``26 days``."""
    if not math.isfinite(seconds):
        return "never"
    for unit, name in ((86400 * 365.25, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit or (name == "h" and seconds >= unit):
            return f"{seconds / unit:.3g} {name}"
    if seconds >= 0.1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
