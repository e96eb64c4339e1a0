"""Training scripts of other libraries, as their users write them: nothing here knows Phalanx.

Each trains on two ranks, saves checkpoints, goes on from its newest one, and waits in the middle of
its first run until ``kill-me`` is gone, so that a test can kill it there.
"""
