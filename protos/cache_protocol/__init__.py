"""What the server and the client share.

    errors      the error tree, and its mapping to the wire
    v1/         code generated from ``protos/cache/v1/cache.proto``
    spec/       what a user asks for
    wire/       the control plane: channels, states, retries, progress
    storage/    shard files and their layout in memory
    cli/        what both commands show

Nothing here knows `cache_server` or `cache_client`.
"""
