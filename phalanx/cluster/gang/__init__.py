"""The gang of a job as the core sees it: how it forms, restores, runs and leaves."""
