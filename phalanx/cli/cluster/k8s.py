"""``phalanx k8s``: manifests, for clusters and for people who read before they apply."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from phalanx.cli.job_file import load_named
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import exit_on, exit_on_config_error, print_json

if TYPE_CHECKING:
    from phalanx.control.backends.kubernetes.watch import PodState
    from phalanx.control.server.http.submission import RequestedWork

Submitted = typer.Option(min=0, help="As given when it was submitted.")

app = typer.Typer(no_args_is_help=True, help="Kubernetes: manifests of jobs and of what they need.")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job, as `phalanx submit` makes it of the same options."""

    job_file: JobFile
    overrides: Set = None
    world_size: WorldSize = None
    name: Annotated[str, typer.Option(help="As given when it was submitted.")] = ""
    spares: Annotated[int, Submitted] = 0
    slot_gpus: Annotated[int, Submitted] = 0

    def wanted(self) -> RequestedWork:
        """As it is described to a server; ConfigError where there is none."""
        from phalanx.control.server.http.submission import RequestedWork

        job, ranks = load_named(self.job_file, self.overrides, self.world_size, self.name)
        return RequestedWork(
            job=job,
            ranks=ranks,
            folder=str(Path.cwd()),
            name=self.name,
            spares=self.spares,
            slot_gpus=self.slot_gpus,
        )


@app.callback()
def root() -> None:
    """Kubernetes: manifests of jobs and of what they need."""


@app.command()
@takes_options
def manifests(
    options: JobOptions,
    install: Annotated[
        bool, typer.Option("--install", help="Print what the namespace needs once, instead.")
    ] = False,
    quota: Annotated[int, typer.Option(min=0, help="With --install: GPUs of a quota.")] = 0,
    json: Json = False,
) -> None:
    """Print the manifests of a job, for `kubectl apply -f -`."""
    from phalanx.control.backends.kubernetes.install import install as installed
    from phalanx.control.backends.kubernetes.manifests import manifests as made

    with exit_on_config_error(json):
        wanted = options.wanted()
        found = installed(wanted.backend.kubernetes, quota) if install else made(wanted)
    print(written(found, json), end="")


@app.command()
@takes_options
def status(options: JobOptions, json: Json = False) -> None:
    """Show the state of a job's pods, and why one does not start."""
    from phalanx.control.backends.kubernetes.manifests import pod_options
    from phalanx.control.backends.kubernetes.watch import pods_of

    with exit_on_config_error(json):
        pods_wanted = pod_options(options.wanted())
    with _said_by_kubernetes():
        pods = pods_of(pods_wanted.name, pods_wanted.site.namespace)
    if json:
        print_json(pods)
    else:
        print_pods(pods)


@app.command()
@takes_options
def delete(options: JobOptions, json: Json = False) -> None:
    """Delete all objects of a job in its namespace; return when they are gone."""
    from phalanx.control.backends.kubernetes.apply import delete as remove
    from phalanx.control.backends.kubernetes.manifests import manifests as made
    from phalanx.control.backends.kubernetes.manifests import pod_options
    from phalanx.control.backends.kubernetes.watch import labels_of

    with exit_on_config_error(json):
        wanted = options.wanted()
        objects, pods = made(wanted), pod_options(wanted)
    with _said_by_kubernetes():
        labels = labels_of(pods.name)
        answer = remove(written(objects, json=True), pods.site.namespace, labels)
    if json:
        print_json({"deleted": answer.splitlines()})
    else:
        print(answer, end="")


@contextmanager
def _said_by_kubernetes() -> Iterator[None]:
    from phalanx.control.backends.kubernetes.apply import KubernetesError

    with exit_on(KubernetesError):
        yield


def print_pods(pods: list[PodState]) -> None:
    """A line a pod."""
    for pod in pods:
        where = pod.node or "no node yet"
        print(f"{pod.name}  {pod.phase.lower()}  {where}" + (f"  {pod.why}" if pod.why else ""))


def written(objects: list[dict[str, Any]], json: bool) -> str:
    """Objects as YAML documents, or as one list in JSON, which needs no package."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        json = True
    if json:
        whole = {"apiVersion": "v1", "kind": "List", "items": objects}
        return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines, such as the job file, as they are."""

    def as_block(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, as_block)
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False))
