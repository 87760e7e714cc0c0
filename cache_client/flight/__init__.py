"""Connections to nodes, and calls that survive forks and interrupts."""
