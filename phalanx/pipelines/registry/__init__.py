"""Models that were registered: versions, scores, lineage, and which one is released."""
