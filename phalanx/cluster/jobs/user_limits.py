"""What users may ask for beside operators: a submission cut down to the site's policy."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec import structs

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.policy import UserPolicy
from phalanx.cluster.reasons import Reason, reason


def refused_to_users(policy: UserPolicy, spec: JobSpec) -> Reason | None:
    """What of a submission only operators may ask for; None: nothing."""
    if spec.forced:
        return reason("operators_force")
    host = urlsplit(spec.webhook).hostname or ""
    if spec.webhook and host not in policy.webhook_hosts:
        allowed = ", ".join(policy.webhook_hosts) or "nowhere"
        return reason("webhook_closed", host=host, allowed=allowed)
    domain = spec.mail.rpartition("@")[2]
    if spec.mail and domain not in policy.mail_domains:
        allowed = ", ".join(policy.mail_domains) or "nowhere"
        return reason("mail_closed", domain=domain, allowed=allowed)
    return None


def limited(policy: UserPolicy, spec: JobSpec) -> tuple[JobSpec, list[Reason]]:
    """The submission as far as a user may go, and a reason for everything that was cut."""
    notes = []
    if spec.priority > policy.most_priority:
        notes.append(reason("priority_limited", most=policy.most_priority, asked=spec.priority))
    if spec.retries > policy.most_retries:
        notes.append(reason("retries_limited", most=policy.most_retries, asked=spec.retries))
    spec = structs.replace(
        spec,
        priority=min(spec.priority, policy.most_priority),
        retries=min(spec.retries, policy.most_retries),
    )
    return spec, notes
