"""The site's own word about its nodes: a TOML file of entries that match nodes by name."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.config.toml_text import parse_toml
from phalanx.hardware.probe.description import SITE_FILE, Fact

EXAMPLE = '[[node]]\nmatch = "gpu-0[0-3]*"\nleaf = "leaf-a"'


class GivenDescription(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What people say of a node, in a file or as options; what is empty, they do not say."""

    kind: str = ""
    features: tuple[str, ...] = ()
    partition: str = ""
    domain: str = ""
    rails: int = 0
    leaf: str = ""
    pod: str = ""
    rack: str = ""
    power: str = ""
    switch: str = ""


class SiteNode(GivenDescription, frozen=True, kw_only=True):
    """An entry: what it says of nodes of some names."""

    match: str  # a pattern of names: "rack7-*"


class SiteFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All entries; of several that match, the last one that says a thing is believed."""

    node: tuple[SiteNode, ...] = ()


def parse_site(text: str, shown: str) -> SiteFile:
    """A site file; ConfigError names what is wrong with it."""
    try:
        return msgspec.convert(parse_toml(text), SiteFile)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("site file", shown, f"not TOML: {error}", "correct it") from None
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`") or "site file"
        raise ConfigError(key, shown, rule, f"e.g. {EXAMPLE!r}") from None


def read_site(path: Path) -> SiteFile:
    """The file; ConfigError where it cannot be read."""
    try:
        return parse_site(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("site file", str(path), why, "name a TOML file") from None


def site_facts(site: SiteFile, name: str) -> list[Fact]:
    """What the file says of a node."""
    facts: dict[str, Fact] = {}
    for entry in site.node:
        if not fnmatch.fnmatchcase(name, entry.match):
            continue
        for key in GivenDescription.__struct_fields__:
            value = getattr(entry, key)
            if value:
                said = ",".join(value) if isinstance(value, tuple) else value
                facts[key] = Fact(key, said, SITE_FILE)
    return list(facts.values())
