"""``phalanx generate``: have a checkpoint continue texts, for a look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from phalanx.cli.checkpoints.model_options import ModelOptions, exit_on_evaluation_error
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json
from phalanx.cli.output import print_json
from phalanx.cli.progress import working
from phalanx.cli.tables import harmless

app = typer.Typer()


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """What is written."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue (repeatable; default: the beginning of a document)."),
    ] = None
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per text.")] = 64
    samples: Annotated[int, typer.Option(min=1, help="Number of texts per prompt.")] = 1
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample among the most likely tokens with this total probability.",
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0


@app.command()
@takes_options
def generate(options: GenerateOptions, json: Json = False) -> None:
    """Generate text from a checkpoint: greedily, or sampled with a seed."""
    model_place = options.place()
    from phalanx.train.evaluate.generate import Sampling
    from phalanx.train.evaluate.run import write_texts

    sampling = Sampling(
        most_tokens=options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    prompts = [prompt for prompt in options.prompt or [""] for _ in range(options.samples)]
    with exit_on_evaluation_error(json), working("generate", json):
        texts = write_texts(model_place, prompts, sampling)
    if json:
        print_json(texts)
        return
    for each in texts:
        print(harmless(f"{each.prompt}|{each.text}".encode()).decode())
