"""Removes secrets from texts that users and logs may see."""
