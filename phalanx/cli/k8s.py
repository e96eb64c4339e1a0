"""``phalanx k8s``: manifests, for clusters and for people who read before they apply."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from phalanx.cli.options import JobFile, Json, Set, WorldSize, load, refused_in_words
from phalanx.config import check, resolve

app = typer.Typer(no_args_is_help=True, help="Kubernetes: manifests of jobs and of what they need.")


@app.callback()
def root() -> None:
    """Kubernetes: manifests of jobs and of what they need."""


@app.command()
def manifests(
    job_file: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    install: Annotated[
        bool, typer.Option("--install", help="What the namespace needs once, instead.")
    ] = False,
    quota: Annotated[int, typer.Option(min=0, help="With --install: GPUs of a quota.")] = 0,
    json: Json = False,
) -> None:
    """Print the manifests of a job, for `kubectl apply -f -`."""
    from phalanx.control.backends.kubernetes.install import install as installed
    from phalanx.control.backends.kubernetes.manifests import manifests as made
    from phalanx.control.submission import Wanted

    with refused_in_words(json):
        job, ranks = load(job_file, overrides, world_size)
        check(job, ranks)
        job = resolve(job, ranks)
        if install:
            found = installed(job.backend.kubernetes, quota)
        else:
            found = made(Wanted(job=job, ranks=ranks, folder=str(Path.cwd())))
    print(written(found, json), end="")


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
