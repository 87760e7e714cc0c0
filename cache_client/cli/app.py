"""The program `cachectl`, and what its commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from cache_client.control.client import CacheClient
from cache_client.job.arguments import seconds_problems
from cache_client.job.connection import Connection
from cache_protocol.cli.output import version_option
from cache_protocol.errors import (
    ConfigError,
)

EXIT_FAILURE = 1
EXIT_NOT_SHOWN = 4


class _Commands(typer.core.TyperGroup):
    """Takes ``-o json`` for ``--json``, as kubectl does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with each ``-o`` replaced."""
        return super().parse_args(ctx, _without_output_option(args))


def _without_output_option(args: list[str]) -> list[str]:
    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if arg == "--":
            return [*found, arg, *rest]
        if arg not in ("-o", "-ojson", "-otable") and name not in ("-o", "--output"):
            found.append(arg)
            continue
        chosen = arg[2:] if arg.startswith("-o") and len(arg) > 3 and not equals else value
        chosen = chosen or next(rest, "")
        if chosen not in ("json", "table"):
            raise ConfigError(f"--output must be json or table, got {chosen!r}")
        found += ["--json"] * (chosen == "json")
    return found


app = typer.Typer(
    name="cachectl",
    no_args_is_help=True,
    cls=_Commands,
    rich_markup_mode=None,  # rich's tables would cut off long options at 80 columns
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
)

_SPEC_HELP = "YAML file that describes the dataset: name, source, sql."

Endpoint = Annotated[
    str | None,
    typer.Option(envvar="CACHE_ENDPOINT", help="grpc://HOST:PORT of any cache node."),
]
TimeoutS = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs; also: -o json.")]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help=_SPEC_HELP)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a dataset.")]
IntervalS = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]


# Options before the command: how every command shows the cache who you are.
_access: dict[str, str | None] = {"token_file": None, "tls_ca": None}


@app.callback()
def _options(
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="<path>",
            help="File of your token; default: CACHE_TOKEN or CACHE_TOKEN_FILE.",
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            metavar="<path>",
            help="Certificates that sign those of the nodes; default: CACHE_TLS_CA.",
        ),
    ] = None,
    show_version: Annotated[bool, version_option("cachectl")] = False,
) -> None:
    """Load, list and drop the datasets of a cache."""
    _access.update(token_file=token_file, tls_ca=tls_ca)


def connection_of(endpoint: str | None, timeout_s: float = 30.0) -> Connection:
    """How a command reaches the cache."""
    problems = seconds_problems("--timeout-s", timeout_s)
    if problems:
        raise ConfigError("; ".join(problems))
    return Connection(
        endpoint,
        deadline_s=timeout_s,
        token_file=_access["token_file"],
        tls_ca=_access["tls_ca"],
    )


def client_of(endpoint: str | None, timeout_s: float = 30.0) -> CacheClient:
    """The client of a command."""
    return CacheClient(connection_of(endpoint, timeout_s))
