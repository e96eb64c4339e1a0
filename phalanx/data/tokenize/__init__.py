"""From clean text to token shards: ``phalanx data tokenize``."""
