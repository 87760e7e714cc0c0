"""Who calls, and what they may do. Knows neither Flight nor gRPC nor HTTP."""
