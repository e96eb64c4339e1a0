"""``phalanx models``: the registry of models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.output import exit_on, print_json
from phalanx.cli.progress import working
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.pipelines.registry.models import (
    ModelLineage,
    ModelRegistry,
    ModelVersion,
    RegistryError,
)
from phalanx.pipelines.registry.promote import promote as move
from phalanx.pipelines.registry.promote import who
from phalanx.pipelines.run.content import last_checkpoint, output_content
from phalanx.pipelines.run.scores_file import ScoresError, read_scores
from phalanx.train.exits import now

app = typer.Typer(no_args_is_help=True, help="The registry of models.")

ModelName = Annotated[str, typer.Argument(help="Name of the model.")]
VersionNumber = Annotated[int, typer.Option("--version", min=0, help="Its version; 0: the newest.")]
RegistryFolder = Annotated[Path, typer.Option("--registry", help="Folder of the registry.")]
DEFAULT = Path("runs/models")


class StageName(StrEnum):
    """Stages that people move a model to."""

    candidate = "candidate"
    released = "released"
    archived = "archived"


@contextmanager
def _registry(folder: Path) -> Iterator[ModelRegistry]:
    with exit_on(RegistryError, ScoresError, OSError):
        yield ModelRegistry(folder)


@app.command()
def ls(
    name: Annotated[str, typer.Argument(help="Only this model.")] = "",
    registry: RegistryFolder = DEFAULT,
    json: Json = False,
) -> None:
    """List models and their versions."""
    with _registry(registry) as models:
        names = [models.get(name).name] if name else models.names()
        versions = [each for found in names for each in models.versions(found)]
    if json:
        print_json(versions)
        return
    made = table("MODEL", "VERSION", "STAGE", "REGISTERED", "SCORES", "CHECKPOINT")
    for each in versions:
        scores = ", ".join(f"{key} {value:.6g}" for key, value in each.scores.items())
        add_row(made, each.name, each.version, each.stage, each.registered, scores, each.checkpoint)
    print_table(made) if versions else print(f"{registry} has no models")


@app.command()
def show(
    name: ModelName,
    version: VersionNumber = 0,
    registry: RegistryFolder = DEFAULT,
    json: Json = False,
) -> None:
    """Show a version: checkpoint, scores, lineage and history of stages."""
    with _registry(registry) as models:
        model = models.get(name, version)
    if json:
        print_json(model)
        return
    facts = {
        "model": f"{model.name} {model.version}, {model.stage}",
        "registered": f"{model.registered} by {model.who}",
        "checkpoint": model.checkpoint,
        "content": model.content,
        "export": model.export,
        **{f"score {key}": f"{value:.6g}" for key, value in model.scores.items()},
        "pipeline": model.lineage.pipeline,
        "manifest": model.lineage.manifest,
        **{f"made of {key}": value for key, value in model.lineage.inputs.items()},
    }
    for key, value in facts.items():
        if value:
            print(plain(f"{key + ':':<14} {value}"))
    for each in model.history:
        print(plain(f"{each.time} {each.stage} by {each.who} {each.reason}".rstrip()))


@app.command()
def register(
    name: ModelName,
    checkpoint: Annotated[Path, typer.Option(exists=True, help="A run, or a checkpoint.")],
    scores: Annotated[
        Path | None, typer.Option(exists=True, help='JSON: {"scores": {metric: number}}.')
    ] = None,
    export: Annotated[
        Path | None, typer.Option(exists=True, help="Hugging Face folder of this version.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(exists=True, help="Manifest of the pipeline run that made it.")
    ] = None,
    registry: RegistryFolder = DEFAULT,
    json: Json = False,
) -> None:
    """Register a checkpoint as the next version of a model, a candidate."""
    with _registry(registry) as models, working("read the checkpoint", json):
        model = ModelVersion(
            name=name,
            version=0,
            checkpoint=str((last_checkpoint(checkpoint) or checkpoint).resolve()),
            content=output_content(checkpoint),
            export=str(export.resolve()) if export else "",
            scores=read_scores(scores) if scores else {},
            lineage=ModelLineage(manifest=str(manifest.absolute()) if manifest else ""),
            registered=now(),
            who=who(),
        )
        made = models.register(model)
    print_json(made) if json else print(f"{made.name} {made.version} is a {made.stage}")


@app.command()
def promote(
    name: ModelName,
    version: VersionNumber = 0,
    stage: Annotated[StageName, typer.Option(help="Stage to move it to.")] = StageName.released,
    gate: Annotated[
        list[str] | None,
        typer.Option(help='Must hold, e.g. "loss <= released + 0.5 %" (repeatable).'),
    ] = None,
    webhook: Annotated[str, typer.Option(metavar="URL", help="Address to notify.")] = "",
    registry: RegistryFolder = DEFAULT,
    json: Json = False,
) -> None:
    """Move a version to a stage; releasing one archives the version released before."""
    from phalanx.control.server.webhooks import bad_address, post

    if webhook and (wrong := bad_address(webhook)):
        raise typer.BadParameter(f"--webhook: {wrong}")
    with _registry(registry) as models:
        model = models.get(name, version)
        done = move(models, model, stage.value, gate or (), webhook, post)
    if json:
        print_json(done)
        return
    print(plain(f"{done.model.name} {done.model.version} is {done.model.stage}"))
    for reason in filter(None, done.model.history[-1].reason.split("; ")):
        print(plain(f"  {reason}"))
    if done.told:
        print(f"the webhook {done.told}")


@app.command()
def export(
    name: ModelName,
    folder: Annotated[
        Path | None, typer.Argument(help="New folder that receives the model.")
    ] = None,
    version: VersionNumber = 0,
    mlflow: Annotated[
        str, typer.Option(metavar="URI", help="MLflow's registry that receives it instead.")
    ] = "",
    registry: RegistryFolder = DEFAULT,
    json: Json = False,
) -> None:
    """Write a version as a Hugging Face folder, or register it in MLflow."""
    if (folder is None) == (not mlflow):
        raise typer.BadParameter("give a FOLDER, or --mlflow URI")
    if folder is None:
        _export_to_mlflow(registry, name, version, mlflow, json)
        return
    with _registry(registry) as models:
        model = models.get(name, version)
        if folder.exists():
            raise RegistryError(f"{folder} exists already: name a new folder")
        if model.export:
            draft = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(draft, ignore_errors=True)
            with working(f"copy {name}", json):
                shutil.copytree(model.export, draft)
            draft.rename(folder)
    if not model.export:
        from phalanx.cli.checkpoints.convert import export_hf

        export_hf(Path(model.checkpoint), folder, json=json)
        return
    print_json({"folder": str(folder), "model": model}) if json else print(
        f"{folder}: {model.name} {model.version}, {model.stage}"
    )


def _export_to_mlflow(registry: Path, name: str, version: int, uri: str, json: bool) -> None:
    from phalanx.pipelines.registry.mlflow_registry import export_to_mlflow

    with _registry(registry) as models:
        model = models.get(name, version)
        number = export_to_mlflow(model, uri)
    if json:
        print_json({"mlflow": uri, "version": number, "model": model})
    else:
        print(f"{model.name} {model.version} is version {number} there")
