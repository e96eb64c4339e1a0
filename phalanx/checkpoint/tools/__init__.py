"""Looking at checkpoints and turning them into other formats."""
