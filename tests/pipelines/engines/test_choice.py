"""Which engine runs steps: known names, and a sentence for the rest."""

from __future__ import annotations

import pytest

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.config import ConfigError
from phalanx.pipelines.engines.choice import executor
from phalanx.pipelines.run.processes import LocalExecutor


@pytest.mark.parametrize(
    ("engine", "said"),
    [("slrm", 'did you mean "slurm"'), ("kubernetes", "phalanx submit --backend kubernetes")],
)
def test_an_engine_that_cannot_run_steps_is_refused_with_what_helps(engine: str, said: str) -> None:
    pipeline = pipeline_from_table({"name": "p", "steps": {}})
    assert isinstance(executor("local", pipeline), LocalExecutor)
    with pytest.raises(ConfigError, match=said):
        executor(engine, pipeline)
