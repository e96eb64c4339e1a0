"""``phalanx ckpt``: look at checkpoints, prove them, copy them into other forms, remove them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.checkpoints.convert import Average, CompareLogits, ExportDtype, TokenizerPath
from phalanx.cli.checkpoints.locate import at, newest, no_checkpoint, prunable, refuse_missing
from phalanx.cli.checkpoints.output import (
    age_text,
    bar,
    mesh_text,
    print_list,
    reported,
    size_text,
    state_text,
)
from phalanx.cli.options import Json
from phalanx.cli.output import print_json

app = typer.Typer(no_args_is_help=True, help="List, verify, convert and remove checkpoints.")

Where = Annotated[
    str,  # a path would make one slash of the two in s3://
    typer.Argument(help="A checkpoint, a run, a folder of runs, or an address (s3://…)."),
]
One = Annotated[
    str, typer.Argument(help="A checkpoint (…/step-00001000), or a run for its newest.")
]


class ForeignFormat(StrEnum):
    """Other people's folders."""

    hf = "hf"
    dcp = "dcp"


@app.command("ls")
def list_(where: Where = "runs", json: Json = False) -> None:
    """List checkpoints with step, tokens, size, mesh, age, verified or not, and what is wrong."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.tools.inspect import describe, find

        listed = [describe(tier, name) for tier, name in find(where)]
    if json:
        print_json(listed)
    elif not listed:
        print(f"no checkpoints in {where}")
    else:
        print_list(listed)


@app.command()
def show(checkpoint: One, json: Json = False) -> None:
    """Show what one checkpoint holds: its place in the run, shards and tensors."""
    with reported(json), torch_imported():
        import msgspec

        from phalanx.checkpoint.read.group_load import stored_tensors
        from phalanx.checkpoint.tools.inspect import describe, find

        tier, name = newest(list(find(checkpoint)), checkpoint)
        listed = describe(tier, name)
        manifest = tier.source(name).manifest
        tensors = {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in sorted(stored_tensors(listed.path).items())
        }
    if json:
        fields = msgspec.structs.asdict(listed)
        print_json({**fields, "config": manifest.config, "tensors": tensors})
        return
    lines = {
        "path": listed.path,
        "step": f"{listed.step:,} of generation {listed.generation}, {listed.tokens:,} tokens",
        "cursor": f"{manifest.cursor.consumed:,} samples consumed",
        "run": f"{listed.ranks} ranks, mesh {mesh_text(listed)}",
        "files": f"{listed.shards} shards, {size_text(listed.bytes)}",
        "made": f"{listed.created}, {age_text(listed)} ago",
        "state": state_text(listed),
    } | ({"imported": f"from {manifest.origin}"} if manifest.origin else {})
    for key, value in lines.items():
        print(f"{key:9} {value}")
    for problem in listed.problems + listed.notes:
        print(f"{'':9} {problem}")
    for name, (shape, dtype) in tensors.items():
        print(f"  {name:56} {' x '.join(map(str, shape)) or 'scalar':>18} {dtype}")


@app.command()
def verify(where: Where, json: Json = False) -> None:
    """Read and verify every byte; exit with 15 if anything is wrong."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.read.verify import verify as prove
        from phalanx.checkpoint.tools.inspect import describe, find

        listed = [describe(tier, name) for tier, name in find(where)]
        if not listed:
            raise no_checkpoint(where)
        verdicts = []
        for one in listed:
            with bar(f"verify {Path(one.path).name}", one.bytes, json) as report:
                verdicts.append(prove(one.path, report))
    if json:
        print_json(verdicts)
    else:
        for verdict in verdicts:
            words = f"{verdict.tensors} tensors, {size_text(verdict.bytes)}"
            bad = "NOT READ" if verdict.unread else "BAD"
            print(f"{verdict.path}: {bad if verdict.problems else 'good'} ({words})")
            for problem in verdict.problems + [verdict.note] * bool(verdict.note):
                print(f"  {problem}")
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(15)


@app.command()
def diff(one: One, other: One, json: Json = False) -> None:
    """Compare two checkpoints: tensors, step, tokens, cursor, mesh, configuration.

    Exit with 1 if anything differs.
    """
    with reported(json), torch_imported():
        from phalanx.checkpoint.format.tier import open_source
        from phalanx.checkpoint.tools.compare import diff as compare
        from phalanx.checkpoint.tools.inspect import find

        left, right = (at(*newest(list(find(path)), path)) for path in (one, other))
        with bar("compare", open_source(left).manifest.total_bytes, json) as report:
            differences = compare(left, right, report)
    if json:
        print_json(differences)
    else:
        for entry in differences:
            detail = f": {entry.elements:,} elements, at most {entry.greatest:.3g}"
            print(f"{entry.name}: {entry.what}{detail if entry.elements else ''}")
        tensors = sum(entry.tensor for entry in differences)
        words = f"{tensors} tensors and {len(differences) - tensors} facts about the run differ"
        print(words if differences else "equal to the bit")
    if differences:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: One,
    folder: Annotated[Path, typer.Argument(help="New folder that receives it.")],
    to: Annotated[
        ForeignFormat, typer.Option(help="Hugging Face weights, or all as torch DCP.")
    ] = ForeignFormat.hf,
    kind: Annotated[
        ExportDtype, typer.Option("--dtype", help="Number format of the weights (hf).")
    ] = ExportDtype.bfloat16,
    max_shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Size limit of one file (hf).")
    ] = 5.0,
    tokenizer: TokenizerPath = None,
    ema: Average = False,
    compare: CompareLogits = True,
    json: Json = False,
) -> None:
    """Write a checkpoint in another form, one tensor in memory at a time."""
    if ema and to is ForeignFormat.dcp:
        raise typer.BadParameter(
            "with --to dcp everything is written, the average too (as ema.*): leave --ema out",
            param_hint="--ema",
        )
    with reported(json, folder), torch_imported():
        import torch

        from phalanx.checkpoint.read.group_load import stored_tensors
        from phalanx.checkpoint.tools.convert import complete_export, export_checkpoint
        from phalanx.checkpoint.tools.dcp import export_dcp
        from phalanx.checkpoint.tools.inspect import find
        from phalanx.model.hf.compare import compare_logits

        path = at(*newest(list(find(checkpoint)), checkpoint))
        prefix = "" if to is ForeignFormat.dcp else "model."
        kinds = [k for name, k in stored_tensors(path).items() if name.startswith(prefix)]
        total = sum(shape.numel() * dtype.itemsize for shape, dtype in kinds)
        notes: dict[str, str] = {}
        with bar(f"export {Path(path).name}", total, json) as report:
            if to is ForeignFormat.dcp:
                done = {"tensors": export_dcp(path, folder, report)}
            else:
                dtype, limit = getattr(torch, kind.value), int(max_shard_gb * 1e9)
                written = export_checkpoint(path, folder, dtype, limit, report, average=ema)
                done = {"parameters": written}
                notes["tokenizer"] = complete_export(path, folder, tokenizer)
                if compare:
                    notes["logits"] = compare_logits(folder)
    if json:
        print_json({"checkpoint": path, "folder": str(folder), **done, **notes})
    else:
        tokenizer_note = "; " + notes["tokenizer"] if "tokenizer" in notes else ""
        print(f"{folder}: {_in_words(done)}{tokenizer_note}")
        if "logits" in notes:
            print(f"logits: {notes['logits']}")


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or DCP folder.")],
    out: Annotated[Path, typer.Argument(help="Folder that receives the checkpoint.")],
    json: Json = False,
) -> None:
    """Turn a Hugging Face folder, a DCP folder or a version 1 checkpoint into a checkpoint."""
    notes: list[str] = []
    with reported(json, out), torch_imported():
        from phalanx.checkpoint.tools.convert import import_checkpoint
        from phalanx.checkpoint.tools.dcp import DCP_FILE, import_dcp

        refuse_missing(folder)
        dcp = (folder / DCP_FILE).is_file()
        names = "*.distcp" if dcp else "*.safetensors"
        total = sum(file.stat().st_size for file in folder.glob(names))
        with bar(f"import {folder.name}", total, json) as report:
            if dcp:
                path = import_dcp(folder, out, report=report, note=notes.append)
            else:
                path = import_checkpoint(folder, out, report=report)
    if json:
        print_json({"checkpoint": str(path), "notes": notes})
        return
    for note in notes:
        print(f"note: {note}")
    print(f"checkpoint: {path}")


@app.command()
def reshard(
    checkpoint: One,
    out: Annotated[Path, typer.Argument(help="Folder that receives the new checkpoint.")],
    shards: Annotated[int, typer.Option(min=1, help="Approximate number of files to write.")] = 1,
    json: Json = False,
) -> None:
    """Rewrite a checkpoint in more or fewer shards (loading on another mesh does not need this)."""
    with reported(json, out), torch_imported():
        from phalanx.checkpoint.format.tier import open_source
        from phalanx.checkpoint.tools.convert import reshard as divide
        from phalanx.checkpoint.tools.inspect import find

        path = at(*newest(list(find(checkpoint)), checkpoint))
        with bar("reshard", open_source(path).manifest.total_bytes, json) as report:
            done = divide(path, out, shards, report)
        made = open_source(done).manifest.world_size
    if json:
        print_json({"checkpoint": str(done), "shards": made})
    else:
        print(f"checkpoint: {done} ({made} shards)")


@app.command()
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=0, help="Newest ones kept; 0: all.")] = 2,
    keep_every: Annotated[int, typer.Option(min=0, help="Also multiples of this step.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, help="Also the best by validation loss.")] = 0,
    quota_gb: Annotated[float, typer.Option(min=0.0, help="Most GB; 0: no limit.")] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints by rule, run by run; never a run's newest good one or a pinned one.

    Takes a run or a folder of runs, not a single checkpoint.
    """
    from phalanx.checkpoint.format.tier import entries, read_scores
    from phalanx.checkpoint.retention import RetentionPolicy, decide

    policy = RetentionPolicy(
        last=keep, every=keep_every, best=keep_best, quota_bytes=int(quota_gb * 1e9)
    )
    removed: dict[str, str] = {}
    with reported(json):
        for tier in prunable(where):
            scores = read_scores(Path(tier.where)) if "://" not in tier.where else {}
            decision = decide(entries(tier, scores, sized=True), policy)
            for name, reason in decision.removed.items():
                if not dry_run:
                    tier.delete(name)
                removed[at(tier, name)] = reason
                if not json:
                    print(f"{'would remove' if dry_run else 'removed'} {at(tier, name)}: {reason}")
    if json:
        print_json({"removed": removed, "dry_run": dry_run})
    else:
        print(f"{len(removed)} {'would go' if dry_run else 'removed'}")


@app.command()
def pin(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint to pin.")],
    off: Annotated[bool, typer.Option("--off", help="Unpin it.")] = False,
    json: Json = False,
) -> None:
    """Pin a checkpoint, so that no rule removes it; or unpin it."""
    from phalanx.checkpoint.format.tier import PIN_FILE
    from phalanx.checkpoint.tools.inspect import find

    with reported(json):
        tier, name = newest(list(find(checkpoint)), checkpoint)
        if off:
            tier.drop(f"{name}/{PIN_FILE}")
        else:
            tier.write(f"{name}/{PIN_FILE}", b"")
    if json:
        print_json({"checkpoint": at(tier, name), "pinned": not off})
    else:
        print(f"{at(tier, name)} is {'not ' * off}pinned")


@contextmanager
def torch_imported() -> Iterator[None]:
    """Import torch quickly: what it makes stays, so garbage is sought in vain."""
    from phalanx.cli.process import collection_paused

    with collection_paused():
        import torch  # noqa: F401
    yield


def _in_words(done: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in done.items())
