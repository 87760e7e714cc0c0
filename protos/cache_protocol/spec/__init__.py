"""What a user asks the cache to hold: specs, secrets, and the settings of a TrainJob."""
