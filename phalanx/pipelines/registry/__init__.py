"""The registry of models: versions, scores, lineage, releases."""
