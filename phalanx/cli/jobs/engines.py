"""``phalanx submit --backend``: a job for an engine that a site already runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from phalanx.cli.output import exit_on, exit_on_config_error, fail, print_json
from phalanx.cli.process import log_to_stderr
from phalanx.cli.tables import plain, when
from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean
from phalanx.control.backends.requested import fitted
from phalanx.control.server.http.submission import RequestedWork
from phalanx.control.trust.secrets import secrets_note

if TYPE_CHECKING:
    from phalanx.control.backends.ray.submit import RayRun
    from phalanx.control.backends.slurm.login import LedJobResult
    from phalanx.control.backends.slurm.submit import SlurmBackend

ENGINES = ("slurm", "ray", "kubernetes")


def to_backend(
    engine: str,
    wanted: RequestedWork,
    *,
    dry_run: bool,
    server: str,
    policy: Path | None,
    json: bool,
) -> None:
    """Hand a job to an engine, or show what it would get."""
    with exit_on_config_error(json):
        if engine not in ENGINES:
            rule = "is no engine that Phalanx knows"
            raise ConfigError("--backend", f'"{engine}"', rule, did_you_mean(engine, ENGINES))
        wanted = fitted(engine, wanted)
        elsewhere = _server(engine, wanted, server)
        if policy is not None and (elsewhere or engine == "kubernetes"):
            rule = "reaches no controller of this job"
            raise ConfigError("--policy", str(policy), rule, "give it to that server, or leave it")
        if note := secrets_note(wanted.environment or wanted.backend.environment):
            print(plain(note), file=sys.stderr)
        if engine == "slurm":
            path = str(policy.absolute()) if policy else ""
            if elsewhere and not dry_run:
                _refuse_unreachable(elsewhere)
            _slurm(wanted, dry_run, elsewhere, path, json)
        elif engine == "ray":
            _ray(wanted, dry_run, policy, json)
        else:
            _kubernetes(wanted, dry_run)


def _server(engine: str, wanted: RequestedWork, server: str) -> str:
    """The controller elsewhere, where the job wants one; "": it runs in the allocation."""
    apart = wanted.backend.controller == "server"
    if apart and engine != "slurm":
        rule = f"a job of {engine} has a controller of its own"
        raise ConfigError("backend.controller", '"server"', rule, 'set it to "job"')
    if apart and not server:
        rule = "needs the address of that server"
        raise ConfigError("backend.controller", '"server"', rule, "give --server URL")
    if server and not apart:
        rule = "is used by no job that has a controller of its own"
        fix = 'set backend.controller = "server" (Slurm), or leave it out'
        raise ConfigError("--server", f'"{server}"', rule, fix)
    return server


def _refuse_unreachable(server: str) -> None:
    """What a job would find out in its allocation only, after hours in the queue."""
    from phalanx.control.client.client import Client, ClientError
    from phalanx.control.wire.api_types import Status

    join = os.environ.get("PHALANX_JOIN_TOKEN_FILE", "")
    if not join or not os.access(join, os.R_OK):
        rule = "agents join that server with the token in this file, which cannot be read"
        fix = "set it to a copy of the server's join.token that the nodes see"
        raise ConfigError("PHALANX_JOIN_TOKEN_FILE", f'"{join}"', rule, fix)
    if not os.environ.get("PHALANX_TOKEN") and not os.environ.get("PHALANX_TOKEN_FILE"):
        rule = "the job submits itself to that server, and needs a token for it"
        fix = "set it to a file that has one, which the nodes see"
        raise ConfigError("PHALANX_TOKEN_FILE", '""', rule, fix)
    try:
        Client(server).get("/v1/status", Status)
    except ClientError as error:
        raise ConfigError("--server", f'"{server}"', str(error), "name one that runs") from None


def _slurm(wanted: RequestedWork, dry_run: bool, server: str, policy: str, json: bool) -> None:
    from phalanx.control.backends.slurm.programs import SlurmError
    from phalanx.control.backends.slurm.submit import SlurmBackend

    backend = SlurmBackend()
    if wanted.backend.controller == "here":
        _slurm_here(wanted, backend, dry_run, policy, json)
    if dry_run:
        print(backend.script(wanted, comments=True, server=server, policy=policy), end="")
        return
    try:
        made = backend.submit(wanted, server=server, policy=policy)
    except SlurmError as error:
        fail(error, 1, {"error": {"code": "refused", "message": str(error)}} if json else None)
    if json:
        print_json(made)
        return
    print(f"Slurm job {made.job} ({wanted.title}): its run is {made.run}")
    print(f"watch it: phalanx why slurm:{made.job}; tail -f {made.output}")


def _slurm_here(
    wanted: RequestedWork, backend: SlurmBackend, dry_run: bool, policy: str, json: bool
) -> NoReturn:
    from phalanx.control.backends.lead import LeadError
    from phalanx.control.backends.slurm.directives import allocation_words
    from phalanx.control.backends.slurm.login import lead_here
    from phalanx.control.backends.slurm.programs import SlurmError
    from phalanx.control.backends.slurm.script import agents_script
    from phalanx.control.client.client import ClientError

    if dry_run:
        options = backend.options(wanted, policy=policy)
        print(" \\\n  ".join(("salloc --no-shell", *allocation_words(options))))
        print(
            f"# and in that allocation, while this process leads the job:\n{agents_script(options)}"
        )
        raise typer.Exit(0)
    log_to_stderr()
    with exit_on(SlurmError, LeadError, ClientError):
        made = lead_here(wanted, backend, Path(policy) if policy else None)
    _end_as(made, json)


def _end_as(made: LedJobResult | RayRun, json: bool) -> NoReturn:
    """Say where the run is, and end as the job did."""
    if json:
        print_json(made)
    else:
        print(f"the run is {made.run}")
    raise typer.Exit(made.code)


def _ray(wanted: RequestedWork, dry_run: bool, policy: Path | None, json: bool) -> None:
    from phalanx.control.backends.lead import LeadError
    from phalanx.control.backends.ray.submit import RayBackend, RayError, describe
    from phalanx.control.client.client import ClientError

    log_to_stderr()
    backend = RayBackend(wanted)
    if dry_run:
        print(describe(backend.need, backend.backend))
        return
    with exit_on(RayError, LeadError, ClientError):
        made = backend.run(policy)
    _end_as(made, json)


def _kubernetes(wanted: RequestedWork, dry_run: bool) -> None:
    from phalanx.cli.cluster.k8s import print_pods, written
    from phalanx.control.backends.kubernetes.apply import KubernetesError, apply, delete
    from phalanx.control.backends.kubernetes.manifests import manifests, pod_options
    from phalanx.control.backends.kubernetes.watch import labels_of, watch

    made, options = manifests(wanted), pod_options(wanted)
    if dry_run:
        print(written(made, json=False), end="")
        return
    text = written(made, json=True)
    with exit_on(KubernetesError):
        print(apply(text), end="")
        if options.held:
            print(f"{options.name} is suspended: `kubectl patch` spec.suspend to false lets it go")
            return
        try:
            print_pods(watch(options.name, options.site.namespace))
        except KubernetesError as error:
            delete(text, options.site.namespace, labels_of(options.name))
            raise KubernetesError(f"{error}\nwhat was created is deleted again") from None


def why_elsewhere(job: str, json: bool) -> None:
    """Where a job of an engine's queue is: slurm:NUMBER."""
    from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
    from phalanx.control.backends.slurm.queue import place_of
    from phalanx.control.backends.slurm.submit import latest_run

    engine, _, number = job.partition(":")
    with exit_on_config_error(json):
        if engine != "slurm" or not number.isdigit():
            raise ConfigError("JOB", f'"{job}"', "is no job of an engine", 'e.g. "slurm:123"')
    with exit_on(SlurmError):
        queued = place_of(SlurmCommands(), int(number))
    if json:
        print_json(queued)
        return
    print(f"Slurm job {queued.job} ({queued.name}) is {queued.state}")
    if queued.text:
        start = (
            when(queued.estimated_start * 10**9) if queued.estimated_start else "unknown to Slurm"
        )
        reason = f" ({queued.reason})" if queued.reason else ""
        print(f"it waits: {queued.text}{reason}; estimated start: {start}")
        print(f"priority {queued.priority}, {queued.ahead} jobs before it in its partition")
        if queued.helps:
            print(f"what helps: {queued.helps}")
    control = latest_run(Path(queued.output.removesuffix(".out"))) / "control"
    if queued.state == "running" and (control / "server.json").exists():
        print(f"inside: phalanx why 1 --state {control}")
