"""``phalanx convert``: weights from and to the files of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.checkpoints.output import bar
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, fail, print_json
from phalanx.cli.progress import working

app = typer.Typer(
    no_args_is_help=True,
    help="Convert weights from and to Hugging Face folders, and from Megatron.",
)

TokenizerPath = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        exists=True,
        help="tokenizer.json, or a model's folder (default: that of the run's corpus).",
    ),
]
Average = Annotated[
    bool, typer.Option("--ema", help="The moving average of the weights, not the weights (hf).")
]
CompareLogits = Annotated[
    bool,
    typer.Option("--compare/--no-compare", help="Compare logits with those of transformers."),
]
HfFolder = Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")]


Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, a run, or runs of a name (runs/NAME): the newest.")
]


class ExportDtype(StrEnum):
    """Number formats that weights are exported in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@app.command("import-hf")
def import_hf(
    folder: HfFolder,
    out: Annotated[Path, typer.Argument(help="Folder that receives the checkpoint.")],
    json: Json = False,
) -> None:
    """Turn a folder of transformers into a checkpoint of its weights."""
    from phalanx.checkpoint.tools.convert import import_checkpoint
    from phalanx.config import to_toml
    from phalanx.model.hf import config_from_hf

    with _reported(json):
        with working(f"import {folder}", json):
            path = import_checkpoint(folder, out)
        model = config_from_hf(folder)
    if json:
        print_json({"checkpoint": str(path), "model": model})
        return
    print(f"checkpoint: {path}\nfor a job file that starts from it:\n")
    print(f'[checkpoint]\nresume = "{path}"\nweights_only = true\n')
    print(to_toml(model, "model"), end="")


@app.command("import-megatron")
def import_megatron(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, help="A torch_dist checkpoint of Megatron-core, or its run."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder that receives the checkpoint.")],
    model: Annotated[
        str, typer.Option("--model", help="Which model it is: a preset, or a job file (*.toml).")
    ],
    json: Json = False,
) -> None:
    """Turn a Megatron-core checkpoint into a checkpoint of its weights."""
    from phalanx.checkpoint.tools import megatron
    from phalanx.config import named_model, to_toml

    notes: list[str] = []
    with _reported(json):
        with exit_on_config_error(json):
            named = named_model(model)
        source = megatron.newest_iteration(folder)
        total = sum(file.stat().st_size for file in source.glob("*.distcp"))
        with bar(f"import {folder.name}", total, json) as report:
            path = megatron.import_megatron(source, out, named, report=report, note=notes.append)
    if json:
        print_json({"checkpoint": str(path), "model": named, "notes": notes})
        return
    for note in notes:
        print(f"note: {note}")
    print(f"checkpoint: {path}\nfor a job file that starts from it:\n")
    print(f'[checkpoint]\nresume = "{path}"\nweights_only = true\n')
    print(to_toml(named, "model"), end="")


@app.command("export-hf")
def export_hf(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="New folder that receives the model.")],
    dtype: Annotated[
        ExportDtype, typer.Option(help="Number format of the weights.")
    ] = ExportDtype.bfloat16,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Size limit of one file.")] = 5.0,
    tokenizer: TokenizerPath = None,
    ema: Average = False,
    compare: CompareLogits = True,
    json: Json = False,
) -> None:
    """Turn a checkpoint into a folder that transformers loads: weights and tokenizer."""
    import torch

    from phalanx.checkpoint.tools.convert import complete_export, export_checkpoint
    from phalanx.model.hf.compare import compare_logits
    from phalanx.train.resume.parent import checkpoint_at

    checkpoint = checkpoint_at(checkpoint)
    with _reported(json):
        kind = getattr(torch, dtype.value)
        limit = int(max_shard_gb * 1e9)
        with working(f"export {checkpoint}", json):
            parameters = export_checkpoint(checkpoint, folder, kind, limit, average=ema)
        notes = {"tokenizer": complete_export(checkpoint, folder, tokenizer)}
        if compare:
            with working("compare logits", json):
                notes["logits"] = compare_logits(folder)
    if json:
        made = {"folder": str(folder), "checkpoint": str(checkpoint), **notes}
        print_json({**made, "parameters": parameters, "dtype": dtype.value})
        return
    what = f"{parameters:,} parameters of {checkpoint} in {dtype.value}"
    print(f"{folder}: {what}; {notes['tokenizer']}")
    if compare:
        print(f"logits: {notes['logits']}")


@app.command()
def merge(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder that receives the checkpoint.")],
    json: Json = False,
) -> None:
    """Merge a checkpoint's adapters into its weights; a job starts from the result."""
    from phalanx.checkpoint.tools.adapters import merge_checkpoint
    from phalanx.train.resume.parent import checkpoint_at

    with _reported(json), working(f"merge {checkpoint}", json):
        path = merge_checkpoint(checkpoint_at(checkpoint), out)
    if json:
        print_json({"checkpoint": str(path)})
        return
    print(f"checkpoint: {path}\nfor a job file that starts from it:\n")
    print(f'[checkpoint]\nresume = "{path}"\nweights_only = true')


@app.command("export-peft")
def export_peft(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="New folder that receives the adapters.")],
    base: Annotated[
        str,
        typer.Option(help="Model that they belong to (default: what the run began from)."),
    ] = "",
    dtype: Annotated[
        ExportDtype, typer.Option(help="Number format of the adapters.")
    ] = ExportDtype.float32,
    json: Json = False,
) -> None:
    """Turn a checkpoint's adapters into a folder that peft loads."""
    import torch

    from phalanx.checkpoint.tools import adapters
    from phalanx.train.resume.parent import checkpoint_at

    checkpoint = checkpoint_at(checkpoint)
    with _reported(json):
        kind = getattr(torch, dtype.value)
        with working(f"export {checkpoint}", json):
            parameters = adapters.export_peft(checkpoint, folder, base, kind)
    if json:
        made = {"folder": str(folder), "checkpoint": str(checkpoint), "dtype": dtype.value}
        print_json({**made, "parameters": parameters})
        return
    print(f"{folder}: {parameters:,} parameters of {checkpoint} in {dtype.value}")


@contextmanager
def _reported(json: bool) -> Iterator[None]:
    """Print what does not fit and end with the exit code of checkpoints."""
    from phalanx.checkpoint import CheckpointError
    from phalanx.model.hf import HfError
    from phalanx.train.exits import ExitCode

    try:
        yield
    except (CheckpointError, HfError) as error:
        shown = {"error": str(error), "code": ExitCode.CHECKPOINT} if json else None
        fail(error, ExitCode.CHECKPOINT, shown)
