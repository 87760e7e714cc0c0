"""Removes secrets from messages and logs."""
