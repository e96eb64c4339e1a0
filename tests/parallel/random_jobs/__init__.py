"""Random jobs on random meshes against plain training that shares no code with the trainer."""
