"""What carries a pipeline's run out: files, processes, a server's jobs."""
