"""``phalanx k8s``: manifests, for clusters and for people who read before they apply."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from phalanx.cli.job_file import load_named
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import exit_on_config_error, print_json

if TYPE_CHECKING:
    from phalanx.control.backends.kubernetes.watch import PodState
    from phalanx.control.server.http.submission import RequestedWork

Name = Annotated[str, typer.Option(help="As it was submitted with.")]
Spares = Annotated[int, typer.Option(min=0, help="As it was submitted with.")]
SlotGpus = Annotated[int, typer.Option(min=0, help="As it was submitted with.")]

app = typer.Typer(no_args_is_help=True, help="Kubernetes: manifests of jobs and of what they need.")


@app.callback()
def root() -> None:
    """Kubernetes: manifests of jobs and of what they need."""


@app.command()
def manifests(
    job_file: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    name: Name = "",
    spares: Spares = 0,
    slot_gpus: SlotGpus = 0,
    install: Annotated[
        bool, typer.Option("--install", help="What the namespace needs once, instead.")
    ] = False,
    quota: Annotated[int, typer.Option(min=0, help="With --install: GPUs of a quota.")] = 0,
    json: Json = False,
) -> None:
    """Print the manifests of a job, for `kubectl apply -f -`."""
    from phalanx.control.backends.kubernetes.install import install as installed
    from phalanx.control.backends.kubernetes.manifests import manifests as made

    with exit_on_config_error(json):
        wanted = _wanted(job_file, overrides, world_size, name, spares, slot_gpus)
        assert wanted.job is not None
        found = installed(wanted.job.backend.kubernetes, quota) if install else made(wanted)
    print(written(found, json), end="")


@app.command()
def status(
    job_file: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    name: Name = "",
    spares: Spares = 0,
    slot_gpus: SlotGpus = 0,
    json: Json = False,
) -> None:
    """How the pods of a job are, and why one does not start."""
    from phalanx.control.backends.kubernetes.manifests import pod_options
    from phalanx.control.backends.kubernetes.watch import pods_of

    with exit_on_config_error(json):
        options = pod_options(_wanted(job_file, overrides, world_size, name, spares, slot_gpus))
    with _said_by_kubernetes():
        pods = pods_of(options.name, options.site.namespace)
    if json:
        print_json(pods)
    else:
        print_pods(pods)


@app.command()
def delete(
    job_file: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    name: Name = "",
    spares: Spares = 0,
    slot_gpus: SlotGpus = 0,
    json: Json = False,
) -> None:
    """Delete everything of a job in its namespace; returns when it is gone."""
    from phalanx.control.backends.kubernetes.apply import delete as remove
    from phalanx.control.backends.kubernetes.manifests import manifests as made
    from phalanx.control.backends.kubernetes.manifests import pod_options
    from phalanx.control.backends.kubernetes.watch import labels_of

    with exit_on_config_error(json):
        wanted = _wanted(job_file, overrides, world_size, name, spares, slot_gpus)
        objects, options = made(wanted), pod_options(wanted)
    with _said_by_kubernetes():
        labels = labels_of(options.name)
        answer = remove(written(objects, json=True), options.site.namespace, labels)
    if json:
        print_json({"deleted": answer.splitlines()})
    else:
        print(answer, end="")


def _wanted(
    job_file: Path,
    overrides: list[str] | None,
    world_size: int | None,
    name: str,
    spares: int,
    slot_gpus: int,
) -> RequestedWork:
    """The same job as `phalanx submit` makes of these options."""
    from phalanx.control.server.http.submission import RequestedWork

    job, ranks = load_named(job_file, overrides, world_size, name)
    folder = str(Path.cwd())
    return RequestedWork(
        job=job, ranks=ranks, folder=folder, name=name, spares=spares, slot_gpus=slot_gpus
    )


@contextmanager
def _said_by_kubernetes() -> Iterator[None]:
    from phalanx.control.backends.kubernetes.apply import KubernetesError

    try:
        yield
    except KubernetesError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


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
