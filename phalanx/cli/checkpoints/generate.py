"""``phalanx generate``: have a checkpoint continue texts, for a look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from phalanx.cli.checkpoints.model_options import ModelOptions, exit_on_evaluation_error
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json
from phalanx.cli.output import print_json
from phalanx.cli.tables import harmless

app = typer.Typer()


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """What is written."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue (repeatable; default: the beginning of a document)."),
    ] = None
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens after each prompt.")] = 64
    samples: Annotated[int, typer.Option(min=1, help="Texts after each prompt.")] = 1
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: the likeliest token each time; 1: as they are.")
    ] = 0.0
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among tokens that have this share.")
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="The same one draws the same texts.")] = 0


@app.command()
@takes_options
def generate(options: GenerateOptions, json: Json = False) -> None:
    """Have a checkpoint's model continue texts: the likeliest way, or drawn by a seed."""
    place = options.place()
    from phalanx.train.evaluate.generate import Sampling
    from phalanx.train.evaluate.run import write_texts

    sampling = Sampling(
        most_tokens=options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    prompts = [prompt for prompt in options.prompt or [""] for _ in range(options.samples)]
    with exit_on_evaluation_error(json):
        texts = write_texts(place, prompts, sampling)
    if json:
        print_json(texts)
        return
    for each in texts:
        print(harmless(f"{each.prompt}|{each.text}".encode()).decode())
