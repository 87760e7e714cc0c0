"""The protobuf package ``cache.v1``: generated code, see ``protos/generate.py``."""
