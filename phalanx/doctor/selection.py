"""Which checks a person asks for, by name, group and depth."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean
from phalanx.doctor.checks.check import PROFILES, Profile
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.node import AGENT_CHECKS, CHECKS
from phalanx.doctor.rates import StorageNeeds

# Measurements by group; those without torch are made by default.
MEASURED = {
    "storage": ("disk", "mounts", "rates", "files", "store"),
    "compute": ("collective", "matmul", "memory", "gemm"),
}
GROUPS = ("os", "gpu", "network", "storage", "compute")
CONTRADICTIONS = (("--quick", "--deep"), ("--quick", "--group"), ("--only", "--group"))
BY_DEFAULT = ("disk", "mounts")
REPLACED = {"limits", "clock"}  # by checks of settings that say more


class Selection(Struct, frozen=True, kw_only=True):
    """Checks of settings, measurements, and whether those are the short ones."""

    settings: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    short: bool = False


def select(
    only: Iterable[str] = (),
    groups: Iterable[str] = (),
    *,
    quick: bool = False,
    deep: bool = False,
    also: Iterable[str] = (),
) -> Selection:
    """The checks for what was asked; ConfigError where a name is none.

    ``also``: measurements that other options imply.
    """
    only, groups, also = tuple(only), tuple(groups), tuple(also)
    for name in only:
        _refuse("--only", name, (*SETTINGS, *CHECKS))
    for name in groups:
        _refuse("--group", name, GROUPS)
    asked = {"--only": only, "--group": groups, "--quick": quick, "--deep": deep}
    for one, other in CONTRADICTIONS:
        if asked[one] and asked[other]:
            raise ConfigError(
                one, f"with {other}", "they ask for different checks", f"leave {other} out"
            )
    settings = tuple(SETTINGS)
    if only:
        settings, measured = tuple(name for name in only if name in SETTINGS), set(only)
        short = quick
    elif quick:
        settings, measured, short = (), set(AGENT_CHECKS), True
    elif groups:
        settings = tuple(name for name, check in SETTINGS.items() if check.group in groups)
        measured = {name for group in groups for name in MEASURED.get(group, ())}
        if not deep:
            measured &= {*BY_DEFAULT, *MEASURED["compute"]}
        short = not deep and "compute" not in groups
    elif deep:
        measured, short = set(CHECKS) - REPLACED, False
    else:
        measured, short = set(BY_DEFAULT), True
    return Selection(
        settings=settings,
        measured=tuple(name for name in CHECKS if name in measured or name in also),
        short=short,
    )


def _refuse(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        kind = option.removeprefix("--").replace("only", "check")
        raise ConfigError(option, name, f"is no {kind}", did_you_mean(name, known))


def profiles_named(names: Iterable[str]) -> tuple[Profile, ...]:
    """Profiles by name; ConfigError where one is none."""
    found = []
    for name in names:
        _refuse("--profile", name, PROFILES)
        found += [profile for profile in PROFILES if profile == name]
    return tuple(found)


def storage_needs(needs: Iterable[str]) -> StorageNeeds:
    """Needs as a person writes them: "read=500"; ConfigError where one is none."""
    fields = {
        "read": "read_mb_per_second",
        "write": "write_mb_per_second",
        "files": "files_per_second",
    }
    found: dict[str, float] = {}
    for text in needs:
        name, _, rate = text.partition("=")
        _refuse("--need", name, tuple(fields))
        try:
            value = float(rate)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError("--need", text, "has no rate", f"e.g. {name}=500")
        found[fields[name]] = value
    return StorageNeeds(**found)
