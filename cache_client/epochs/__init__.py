"""Passes over an epoch: where they stand, and what they report."""
