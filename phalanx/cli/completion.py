"""What a shell completes: numbers of jobs and names of nodes, as the server knows them now."""

from __future__ import annotations

from collections.abc import Iterable


def job_numbers(incomplete: str) -> list[tuple[str, str]]:
    """Jobs that have not ended, with their names; nothing where no server answers."""
    from phalanx.control.client.client import Client, ClientError
    from phalanx.control.wire.api_types import JobList

    try:
        jobs = Client().get("/v1/jobs", JobList, limit=1000, newest=True).jobs
    except ClientError:
        return []
    return _beginning(incomplete, ((str(job.id), f"{job.name} ({job.state})") for job in jobs))


def node_names(incomplete: str) -> list[tuple[str, str]]:
    """Nodes with their states; nothing where no server answers."""
    from phalanx.control.client.client import Client, ClientError
    from phalanx.control.wire.api_types import NodeList

    try:
        nodes = Client().get("/v1/nodes", NodeList, limit=20_000).nodes
    except ClientError:
        return []
    return _beginning(incomplete, ((node.name, node.state) for node in nodes))


def nodes_and_jobs(incomplete: str) -> list[tuple[str, str]]:
    """Of what a command takes either of."""
    return [*node_names(incomplete), *job_numbers(incomplete)]


def _beginning(incomplete: str, known: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [each for each in known if each[0].startswith(incomplete)]
