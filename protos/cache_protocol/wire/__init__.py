"""Channels, states, retries and progress: what both ends of the control plane agree on."""
