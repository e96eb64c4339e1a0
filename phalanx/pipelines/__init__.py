"""Pipelines from raw files to released weights: a step runs again when its inputs have changed."""
