"""``phalanx config``: what a job says, what its keys mean, and whether it can run."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.job_file import load
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.config import (
    ConfigError,
    Section,
    check,
    explain,
    job_from_table,
    resolve,
    resolve_model,
    to_toml,
)

if TYPE_CHECKING:
    from phalanx.config import KeyDoc

app = typer.Typer(no_args_is_help=True, help="Show, explain and check configurations.")


@app.command()
def show(
    path: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="Without it: the defaults.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Show this model shape instead of a job.")] = "",
    overrides: Set = None,
    world_size: WorldSize = None,
    json: Json = False,
) -> None:
    """Print the resolved tree of settings, or one preset."""
    with exit_on_config_error(json):
        if preset and path is not None:
            rule = "shows a model shape instead of a job's file"
            raise ConfigError("--preset", preset, rule, f"leave out {path} or --preset")
        if preset:
            table = {"model": {"preset": preset}}
            model = resolve_model(job_from_table(table, overrides or []).model)
            _print_section(model, "model", json)
            return
        if path is None:
            _print_section(job_from_table({}, overrides or []), "", json)
            return
        job, ranks = load(path, overrides, world_size)
        _print_section(resolve(job, ranks), "", json)


@app.command("check")
def check_command(
    path: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    files: Annotated[
        bool,
        typer.Option(
            "--files/--no-files",
            help="Also open the corpus, checkpoint and weights that the job names; "
            "without, for a job that will run elsewhere.",
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Check whether a job can run; otherwise list every problem and exit with 2."""
    with exit_on_config_error(json):
        job, ranks = load(path, overrides, world_size)
        check(job, ranks)
        job = resolve(job, ranks)
        from phalanx.plan.search.gpus_that_fit import fit_of
        from phalanx.train.resume.refusal import refuse_files, refuse_rate

        refuse_rate(job)
        if files:
            refuse_files(job)
    fit = fit_of(job, ranks) if job.train.device != "cpu" else None
    if json:
        memory = {"memory": fit} if fit is not None else {}
        print_json({"problems": [], "world_size": ranks, "files_checked": files, **memory})
        return
    axes = job.parallel
    unread = "" if files else "; its files were not looked at"
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    print(
        f"{path}: fine on {count} (pipeline {axes.pipeline}, data {axes.data}, "
        f"context {axes.context}, tensor {axes.tensor}){unread}"
    )
    if fit is not None and fit.text:
        print(f"warning: {fit.text}", file=sys.stderr)


@app.command("explain")
def explain_command(
    key: Annotated[str, typer.Argument(help="A key or a section, e.g. parallel.zero.")] = "",
    json: Json = False,
) -> None:
    """Explain a key: its meaning, accepted values and default."""
    with exit_on_config_error(json):
        docs = explain(key)
    if json:
        print_json(docs)
        return
    for doc in docs:
        print(_paragraph(doc))


def _paragraph(doc: KeyDoc) -> str:
    table = doc.section and not doc.default
    lines = [doc.meaning]
    if not table:
        default = f"default {doc.default}" if doc.default else "must be given"
        lines.append(f"{doc.allowed}; {default}")
    wrapper = textwrap.TextWrapper(
        width=max(shutil.get_terminal_size().columns, 20),
        initial_indent=" " * 4,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([f"[{doc.key}]" if table else doc.key, *map(wrapper.fill, lines)])


def _print_section(section: Section, name: str, json: bool) -> None:
    if json:
        print_json(section)
    else:
        print(to_toml(section, name), end="")
