"""The control plane, as both ends use it: channels, states, retries, progress of loads."""
