"""The HTTP port of a node: `service` answers, with what `page` and `metrics` make of a `Status`."""
