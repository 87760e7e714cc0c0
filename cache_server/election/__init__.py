"""Elects the coordinator among the nodes, and keeps its catalogue where the next one finds it."""
