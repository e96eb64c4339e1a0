"""All rules on one profile."""

from __future__ import annotations

import msgspec

from phalanx.config import Job
from phalanx.observe.profile import step_rules, traffic_rules
from phalanx.observe.profile.advice import Advice, Rule
from phalanx.observe.profile.profile import JobProfile

RULES: tuple[Rule, ...] = (
    step_rules.slow_loader,
    step_rules.host_sync,
    step_rules.fp32_matmul,
    step_rules.recompute,
    step_rules.small_micro_batch,
    step_rules.power_cap,
    step_rules.fragmentation,
    step_rules.recompiles,
    traffic_rules.tiny_buckets,
    traffic_rules.exposed_gathers,
    traffic_rules.exposed_reductions,
    traffic_rules.tensor_traffic,
)


def advise(profile: JobProfile) -> list[Advice]:
    """All that applies, the largest gain first."""
    job = msgspec.convert(profile.job, Job)
    found = (rule(profile, job) for rule in RULES)
    return sorted((a for a in found if a is not None), key=lambda a: -a.gain)
