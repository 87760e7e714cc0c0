"""The control plane, as both ends use it: channels, credentials, progress of loads."""
