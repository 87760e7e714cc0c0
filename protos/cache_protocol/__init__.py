"""Code that server and client share.

    errors      the error tree, and its mapping to the wire
    v1/         code generated from ``protos/cache/v1/cache.proto``
    datasets/   what a user asks for
    wire/       the control plane: channels, credentials, progress of loads
    storage/    shard files and their layout in memory
    cli/        output of both commands

Nothing here imports `cache_server` or `cache_client`.
"""
