"""``phalanx coord-check``: whether a job's settings transfer to models of other widths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import JobFile, Json, Set
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.config import ConfigError, load_job

if TYPE_CHECKING:
    from phalanx.train.width.coordinates import Coordinate

app = typer.Typer()


@app.command("coord-check")
def coord_check(
    path: JobFile,
    overrides: Set = None,
    widths: Annotated[
        str, typer.Option(metavar="N,N,…", help="Values of model.dim, ascending.")
    ] = "128,256,512",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of each width.")] = 2,
    json: Json = False,
) -> None:
    """Train a job's model at several small widths, and compare how far activations move."""
    with exit_on_config_error(json):
        job, sizes = load_job(path, overrides or []), _sizes(widths)
    from phalanx.train.width.coordinates import coordinates

    def seen(width: int) -> None:
        if not json:
            print(f"width {width}: {steps} steps", flush=True)

    with exit_on_config_error(json):
        coordinates_seen = coordinates(job, sizes, steps, seen)
    if json:
        print_json([{**_fields(one), "steady": one.steady} for one in coordinates_seen])
    else:
        _print(coordinates_seen, sizes, job.model.width_base)
    raise typer.Exit(0 if all(one.steady for one in coordinates_seen) else 1)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 65_536 for part in parts):
        fix = "give numbers of model.dim, such as 128,256,512"
        raise ConfigError("--widths", f'"{text}"', "must be numbers from 1 to 65536", fix)
    sizes = [int(part) for part in parts]
    if len(sizes) < 2 or sizes != sorted(set(sizes)):
        rule = "must be two or more, ascending"
        raise ConfigError("--widths", f'"{text}"', rule, "give some, such as 128,256,512")
    return sizes


def _print(coordinates: list[Coordinate], widths: list[int], width_base: int) -> None:
    head = " ".join(f"{width:>9}" for width in widths)
    print(f"\n{'moved, root mean square':28} {head}   slope")
    for one in coordinates:
        cells = " ".join(f"{value:9.2e}" for value in one.moved)
        print(f"{one.name:28} {cells}   {one.slope:+.2f}{'' if one.steady else '  CHANGES'}")
    changing = sum(not one.steady for one in coordinates)
    if not changing:
        print("\nno activation's movement depends on the width")
        return
    advice = "" if width_base else "; set model.width_base to the width that they were found at"
    print(
        f"\n{changing} of {len(coordinates)} depend on the width: settings do not transfer{advice}"
    )


def _fields(found: Coordinate) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__struct_fields__}
