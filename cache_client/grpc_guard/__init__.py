"""Protects gRPC from what it does not survive: forks, and interrupts of the main thread."""
