"""``phalanx ckpt``: look at checkpoints, prove them, copy them into other forms, remove them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.cli.options import Json, print_json

if TYPE_CHECKING:
    from phalanx.checkpoint.inspect import Listed
    from phalanx.checkpoint.tier import Tier

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, prove, convert, remove them.")

Where = Annotated[
    str,  # a path would make one slash of the two in s3://
    typer.Argument(help="A checkpoint, a run, a folder of runs, or an address (s3://…)."),
]
One = Annotated[
    str, typer.Argument(help="A checkpoint (…/step-00001000), or a run for its newest.")
]


class Form(StrEnum):
    """Other people's folders."""

    hf = "hf"
    dcp = "dcp"


class Dtype(StrEnum):
    """Number formats that weights are exported in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@app.command("ls")
def list_(where: Where = "runs", json: Json = False) -> None:
    """List checkpoints with step, tokens, size, mesh, age, verified or not, and what is wrong."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.inspect import describe, find

        found = [describe(tier, name) for tier, name in find(where)]
    if json:
        print_json(found)
    elif not found:
        print(f"no checkpoints in {where}")
    else:
        print_list(found)


@app.command()
def show(checkpoint: One, json: Json = False) -> None:
    """Show what one checkpoint holds: its place in the run, shards and tensors."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.inspect import describe, find
        from phalanx.checkpoint.loader import stored_tensors

        tier, name = newest(list(find(checkpoint)), checkpoint)
        listed = describe(tier, name)
        manifest = tier.source(name).manifest
        tensors = {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in sorted(stored_tensors(listed.path).items())
        }
    if json:
        print_json({**_fields(listed), "config": manifest.config, "tensors": tensors})
        return
    for key, value in _fields(listed).items():
        print(f"{key:12} {value}")
    print(f"{'cursor':12} {manifest.cursor.consumed:,} samples consumed")
    for name, (shape, dtype) in tensors.items():
        print(f"  {name:56} {' x '.join(map(str, shape)) or 'scalar':>18} {dtype}")


@app.command()
def verify(where: Where, json: Json = False) -> None:
    """Read every byte and prove it; the exit code is 15 where something is wrong."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.inspect import describe, find
        from phalanx.checkpoint.inspect import verify as prove

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
            words = f"{verdict.tensors} tensors, {_size(verdict.bytes)}"
            print(f"{verdict.path}: {'BAD' if verdict.problems else 'good'} ({words})")
            for problem in verdict.problems:
                print(f"  {problem}")
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(15)


@app.command()
def diff(one: One, other: One, json: Json = False) -> None:
    """Name the tensors of two checkpoints that differ; the exit code is 1 where any does."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.inspect import diff as compare
        from phalanx.checkpoint.inspect import find

        left, right = (at(*newest(list(find(path)), path)) for path in (one, other))
        with bar("compare", None, json) as report:
            found = compare(left, right, report)
    if json:
        print_json(found)
    else:
        for entry in found:
            detail = f": {entry.elements:,} elements, at most {entry.greatest:.3g}"
            print(f"{entry.name}: {entry.what}{detail if entry.elements else ''}")
        print(f"{len(found)} tensors differ" if found else "equal to the bit")
    if found:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: One,
    folder: Annotated[Path, typer.Argument(help="New folder that receives it.")],
    to: Annotated[Form, typer.Option(help="Hugging Face weights, or all as torch DCP.")] = Form.hf,
    dtype: Annotated[Dtype, typer.Option(help="Of exported weights (hf).")] = Dtype.bfloat16,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Of one file (hf).")] = 5.0,
    json: Json = False,
) -> None:
    """Write a checkpoint in another form, one tensor in memory at a time."""
    with reported(json), torch_imported():
        import torch

        from phalanx.checkpoint.convert import export_checkpoint
        from phalanx.checkpoint.dcp import export_dcp
        from phalanx.checkpoint.inspect import find

        path = at(*newest(list(find(checkpoint)), checkpoint))
        with bar(f"export {Path(path).name}", None, json) as report:
            if to is Form.dcp:
                done = {"tensors": export_dcp(path, folder, report)}
            else:
                kind, limit = getattr(torch, dtype.value), int(max_shard_gb * 1e9)
                done = {"parameters": export_checkpoint(path, folder, kind, limit, report)}
    answer = {"checkpoint": path, "folder": str(folder), **done}
    print_json(answer) if json else print(f"{folder}: " + _in_words(done))


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or DCP folder.")],
    out: Annotated[Path, typer.Argument(help="Folder that receives the checkpoint.")],
    json: Json = False,
) -> None:
    """Turn a Hugging Face folder, a DCP folder or a version 1 checkpoint into a checkpoint."""
    notes: list[str] = []
    with reported(json), torch_imported():
        from phalanx.checkpoint.convert import import_checkpoint
        from phalanx.checkpoint.dcp import DCP_FILE, import_dcp

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
    shards: Annotated[int, typer.Option(min=1, help="About how many files it has.")] = 1,
    json: Json = False,
) -> None:
    """Write a checkpoint anew in more or fewer shards; loading needs none of this."""
    with reported(json), torch_imported():
        from phalanx.checkpoint.convert import reshard as divide
        from phalanx.checkpoint.inspect import find
        from phalanx.checkpoint.tier import open_source

        path = at(*newest(list(find(checkpoint)), checkpoint))
        with bar("reshard", open_source(path).manifest.total_bytes, json) as report:
            done = divide(path, out, shards, report)
    print_json({"checkpoint": str(done)}) if json else print(f"checkpoint: {done}")


@app.command()
def prune(
    where: Annotated[str, typer.Argument(help="A folder of checkpoints, a run, or an address.")],
    keep: Annotated[int, typer.Option(min=0, help="Newest ones kept; 0: all.")] = 2,
    keep_every: Annotated[int, typer.Option(min=0, help="Also multiples of this step.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, help="Also the best by validation loss.")] = 0,
    quota_gb: Annotated[float, typer.Option(min=0.0, help="Most GB; 0: no limit.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints by rule; never the newest good one, nor a pinned one."""
    from phalanx.checkpoint.retention import Policy, decide
    from phalanx.checkpoint.tier import entries, open_tier, read_scores

    with reported(json):
        inside = Path(where) / "checkpoints"
        root = str(inside) if "://" not in where and inside.is_dir() else where
        tier = open_tier(root)
        policy = Policy(
            last=keep, every=keep_every, best=keep_best, quota_bytes=int(quota_gb * 1e9)
        )
        scores = read_scores(Path(root)) if "://" not in root else {}
        decision = decide(entries(tier, scores, sized=True), policy)
        for name in decision.removed if not dry_run else ():
            tier.delete(name)
    if json:
        print_json({"removed": decision.removed, "dry_run": dry_run})
        return
    for name, reason in decision.removed.items():
        print(f"{'would remove' if dry_run else 'removed'} {root}/{name}: {reason}")
    print(f"{len(decision.removed)} {'would go' if dry_run else 'removed'}")


@app.command()
def pin(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint that is to stay.")],
    off: Annotated[bool, typer.Option("--off", help="Let it go again.")] = False,
    json: Json = False,
) -> None:
    """Keep a checkpoint whatever the rules say, or no longer."""
    from phalanx.checkpoint.inspect import find
    from phalanx.checkpoint.tier import PIN_FILE

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


def print_list(found: list[Listed]) -> None:
    """Columns for people; paths stay whole, so that they can be copied."""
    rows = [("step", "tokens", "size", "ranks", "mesh", "age", "state", "path")]
    for one in found:
        mesh = " ".join(f"{axis}{size}" for axis, size in one.mesh.items() if size > 1) or "-"
        good = "verified" if one.verified else f"part of {one.parts}" if one.parts else "complete"
        state = "NOT GOOD" if one.problems else good + ", pinned" * one.pinned
        step, tokens, ranks = f"{one.step:,}", f"{one.tokens:,}", f"{one.ranks}"
        age, size = _age(one.age_seconds) if one.created else "-", _size(one.bytes)
        rows.append((step, tokens, size, ranks, mesh, age, state, one.path))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        right = (cell.rjust(width) for cell, width in zip(row[:4], widths[:4], strict=True))
        left = (cell.ljust(width) for cell, width in zip(row[4:], widths[4:], strict=True))
        print("  ".join((*right, *left)).rstrip())
    for one in found:
        for problem in one.problems:
            print(f"{one.path}: {problem}")


def newest(found: list[tuple[Tier, str]], where: str) -> tuple[Tier, str]:
    """Of what was found the last complete one."""
    complete = [(tier, name) for tier, name in found if name in tier.names()]
    if not complete:
        raise no_checkpoint(where)
    return complete[-1]


def at(tier: Tier, name: str) -> str:
    return f"{tier.where}/{name}"


def refuse_missing(folder: Path) -> None:
    """Say so where there is no folder to import."""
    from phalanx.checkpoint import CheckpointError

    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "there is no such folder"
        fix = "name one with config.json and *.safetensors, or with DCP's .metadata"
        raise CheckpointError(folder, problem, fix)


def no_checkpoint(where: str) -> Exception:
    from phalanx.checkpoint import CheckpointError

    return CheckpointError(where, "there is no complete checkpoint", "phalanx ckpt ls lists them")


@contextmanager
def bar(name: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on standard error, where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = quiet or not sys.stderr.isatty()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def torch_imported() -> Iterator[None]:
    """Import torch quickly: what it makes stays, so garbage is sought in vain."""
    from phalanx.cli.options import collection_paused

    with collection_paused():
        import torch  # noqa: F401
    yield


@contextmanager
def reported(json: bool) -> Iterator[None]:
    """Print what is wrong in words and end with the exit code of checkpoints."""
    from phalanx.checkpoint import CheckpointError

    try:
        yield
    except Exception as error:
        foreign = sys.modules.get("phalanx.model.hf_config")
        known = (CheckpointError, OSError) + ((foreign.HfError,) if foreign else ())
        if not isinstance(error, known):
            raise
        if json:
            print_json({"error": str(error)})
        else:
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(15) from None


def _fields(listed: Listed) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(listed)


def _in_words(done: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in done.items())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
