"""What to cache: specs, their secrets, and the settings of a TrainJob."""
