"""Engines that run steps' processes elsewhere; the driver of the run stays on this machine."""
