"""Settings of a program that is submitted: it has no job file, and engines want to know of it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config.backend import Backend
from phalanx.config.errors import ConfigError
from phalanx.config.load import overridden
from phalanx.config.rules.backend import backend_problems
from phalanx.config.section import Section
from phalanx.config.tree import build, mistakes


class ProgramSettings(Section, frozen=True, kw_only=True):
    """What --set can say of a program, which has no job file."""

    backend: Backend = Backend()


def program_backend(overrides: Sequence[str]) -> Backend:
    """Settings of engines for a program, by ``backend.key=value`` texts alone."""
    merged, problems = overridden({}, overrides, ProgramSettings)
    problems += mistakes(ProgramSettings, merged)
    if not problems:
        made = build(ProgramSettings, merged).backend
        problems += backend_problems(made)
    if problems:
        raise ConfigError.of(problems)
    return made
