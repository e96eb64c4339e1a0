"""What a checkpoint is on disk: manifest, shards, and who writes which part."""
