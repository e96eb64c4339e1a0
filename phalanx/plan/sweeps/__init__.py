"""Sweeps: choose trials, promote them between rungs, bound their cost, fit scaling laws."""
