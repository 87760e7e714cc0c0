"""What the server and the client share, and all that they share.

The wire contract (``protos/cache/v1/*.proto`` with the generated code beside it) and the errors
that its codes stand for. Nothing here may know of ``cache_server`` or ``cache_client``.
"""
