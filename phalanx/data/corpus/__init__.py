"""Token shards and foreign formats on disk."""
