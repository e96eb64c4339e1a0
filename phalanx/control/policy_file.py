"""A site's policy from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from phalanx.cluster.admit import policy_problems
from phalanx.cluster.job import Expected
from phalanx.cluster.policy import Policy
from phalanx.cluster.timeouts import derive
from phalanx.config import ConfigError


def read_policy(path: Path) -> Policy:
    """The policy in a file; ConfigError names what is wrong with it."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            "--policy", str(path), error.strerror or "unreadable", "name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--policy", str(path), f"not TOML: {error}", "correct it") from None
    try:
        policy = msgspec.convert(table, Policy)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `$.")
        raise ConfigError(where.rstrip("`") or "policy", "", rule, f"correct {path}") from None
    derive(policy.timeouts, Expected())
    problems = policy_problems(policy.queue)
    if problems:
        raise ConfigError.of(problems)
    return policy
