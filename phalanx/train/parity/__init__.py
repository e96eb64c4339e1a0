"""Whether every mesh trains a job's model as one process does: `phalanx parity`."""
