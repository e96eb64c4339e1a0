"""A registered model as a version of MLflow's registry: its folder, scores and lineage as tags."""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.pipelines.registry.models import ModelVersion, RegistryError

PREFIX = "phalanx."
MOST_TAG = 5000  # characters that MLflow takes


def mlflow_tags(model: ModelVersion) -> dict[str, str]:
    """Tags of a model version in MLflow."""
    tags = {
        "version": str(model.version),
        "content": model.content,
        "checkpoint": model.checkpoint,
        "pipeline": model.lineage.pipeline,
        "manifest": model.lineage.manifest,
        **{f"score.{metric}": repr(value) for metric, value in model.scores.items()},
    }
    return {PREFIX + name: value[:MOST_TAG] for name, value in tags.items() if value}


def export_to_mlflow(model: ModelVersion, uri: str) -> int:
    """Register it in MLflow once and return MLflow's version; the alias follows the release."""
    try:
        mlflow: Any = importlib.import_module("mlflow")
    except ImportError:
        raise RegistryError("MLflow is not installed: pip install 'phalanx[mlflow]'") from None
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        known = client.search_model_versions(f"name = '{model.name}'")
        if not known and not client.search_registered_models(f"name = '{model.name}'"):
            client.create_registered_model(model.name)
        tags = mlflow_tags(model)
        same = [each for each in known if each.tags.get(f"{PREFIX}version") == str(model.version)]
        made = (
            same[0]
            if same
            else client.create_model_version(
                model.name, source=model.export or model.checkpoint, tags=tags
            )
        )
        if model.stage == "released":
            client.set_registered_model_alias(model.name, "released", made.version)
    except mlflow.exceptions.MlflowException as error:
        raise RegistryError(f"MLflow at {uri}: {error.message}") from None
    return int(made.version)
