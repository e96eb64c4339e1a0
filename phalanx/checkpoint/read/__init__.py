"""Finding, proving and loading checkpoints, from disk and from memory."""
