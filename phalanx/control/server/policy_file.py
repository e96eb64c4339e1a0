"""A site's policy from a TOML file."""

from __future__ import annotations

from pathlib import Path

from phalanx.cluster.jobs.feasibility import policy_problems
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.timeouts import derive
from phalanx.config import ConfigError
from phalanx.control.host.toml_file import read_struct


def read_policy(path: Path) -> Policy:
    """The policy in a file; ConfigError names what is wrong with it."""
    policy = read_struct(path, Policy, "--policy")
    problems = policy_problems(policy)
    if problems:
        raise ConfigError.of(problems)
    derive(policy.timeouts, Expected())
    return policy
