"""The verbs of a node over Flight and gRPC. Each parses, calls one function, encodes."""
