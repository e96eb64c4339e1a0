"""Models in MLflow's registry: tags that lead back, one version for one, the release's alias."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.pipelines.registry.mlflow_registry import export_to_mlflow, mlflow_tags
from phalanx.pipelines.registry.models import ModelLineage, ModelVersion

MODEL = ModelVersion(
    name="toy",
    version=3,
    checkpoint="/c",
    content="abc",
    scores={"docs.loss": 2.5},
    lineage=ModelLineage(pipeline="small", manifest="/m.json"),
    registered="now",
)


def test_tags_hold_scores_and_lineage_and_nothing_empty() -> None:
    assert mlflow_tags(structs.replace(MODEL, content="")) == {
        "phalanx.version": "3",
        "phalanx.checkpoint": "/c",
        "phalanx.pipeline": "small",
        "phalanx.manifest": "/m.json",
        "phalanx.score.docs.loss": "2.5",
    }


@pytest.mark.soak
def test_a_version_is_registered_once_and_its_release_is_an_alias(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / "export"
    folder.mkdir()
    model = structs.replace(MODEL, export=str(folder))
    first = export_to_mlflow(model, uri)
    assert export_to_mlflow(structs.replace(model, stage="released"), uri) == first
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    version = client.get_model_version_by_alias("toy", "released")
    assert version.tags["phalanx.score.docs.loss"] == "2.5" and version.source == str(folder)
