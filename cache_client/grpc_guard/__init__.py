"""Protects gRPC from forks and from interrupts of the main thread."""
