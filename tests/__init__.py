"""Tests fork ranks, so torch and numpy make no threads: decided before anything imports them."""

from phalanx.train.rank.threads import keep_single_threaded

keep_single_threaded()
