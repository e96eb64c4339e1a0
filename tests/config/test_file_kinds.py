"""A file of another kind is named, with the command that reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.cluster.pipelines.description import read_pipeline
from phalanx.config import ConfigError
from phalanx.config.load import load_job
from phalanx.data.prepare.recipe import load_recipe
from phalanx.plan.sweeps.description import read_sweep
from phalanx.simulate.scenario.load import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIO = EXAMPLES.parent / "phalanx" / "simulate" / "scenarios" / "llama3-54d.toml"
READERS: dict[Path, Callable[[Path], object]] = {
    EXAMPLES / "tiny.toml": load_job,
    EXAMPLES / "sweep.toml": read_sweep,
    EXAMPLES / "pipeline.toml": read_pipeline,
    EXAMPLES / "pipeline-recipe.toml": load_recipe,
    SCENARIO: lambda path: load_scenario(str(path)),
}
COMMANDS = {
    "tiny.toml": "phalanx train FILE",
    "sweep.toml": "phalanx sweep run FILE",
    "pipeline.toml": "phalanx pipeline run FILE",
    "pipeline-recipe.toml": "phalanx data prepare FILE",
    "llama3-54d.toml": "phalanx simulate FILE",
    "chaos.toml": "phalanx chaos JOB --plan FILE",
}


@pytest.mark.parametrize("path", [*READERS, EXAMPLES / "chaos.toml"], ids=lambda path: path.name)
def test_a_file_of_another_kind_is_one_mistake_that_says_what_reads_it(path: Path) -> None:
    for written, read in READERS.items():
        if written == path:
            continue
        with pytest.raises(ConfigError) as refused:
            read(path)
        assert len(refused.value.problems) == 1
        assert COMMANDS[path.name] in str(refused.value)


def test_a_missing_key_of_a_file_belongs_at_its_top(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('name = "s"\njob = "job.toml"\n')
    with pytest.raises(ConfigError, match=r"parameters: is missing; .* at the top of the file$"):
        read_sweep(tmp_path / "sweep.toml")
