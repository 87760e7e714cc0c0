"""The protobuf package ``cache``, one subpackage for each version of the wire contract."""
