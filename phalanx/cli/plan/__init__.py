"""Commands before a run: ``plan`` chooses a mapping, ``simulate`` plays a fleet."""
