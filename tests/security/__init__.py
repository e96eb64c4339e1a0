"""Attacks that must fail: each test plays somebody who wants more than they may."""
