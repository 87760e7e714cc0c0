"""``--version`` for both commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import typer


def version_option(program: str) -> Any:
    """The option that prints the version of ``program`` and exits; for `typing.Annotated`."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {version('trainer-data-cache')}")
            raise typer.Exit

    return typer.Option("--version", is_eager=True, callback=show, help="Show the version.")
