"""Runs that a server drives with its jobs as steps; started and watched from this machine."""
