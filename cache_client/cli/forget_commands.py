"""The commands of `cachectl` that forget rows, and that check the attestations."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cache_client.cli.app import AsJson, Endpoint, TimeoutS, client_of
from cache_client.cli.display import print_json, show_line, show_rows
from cache_protocol.errors import ConfigError
from cache_protocol.wire.attestations import verify

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the dataset.")]


def forget(
    name: _Name,
    where: Annotated[
        list[str], typer.Option(metavar="SQL", help="Condition of the rows; several: all hold.")
    ],
    reason: Annotated[str, typer.Option(help="For the attestation. Name no person.")],
    dry_run: Annotated[bool, typer.Option(help="Only count the rows.")] = False,
    keep_condition: Annotated[
        bool, typer.Option(help="Write the conditions into the attestation.")
    ] = False,
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 600.0,
    as_json: AsJson = False,
) -> None:
    """Erase rows everywhere, with a proof.

    Prints the attestation. The rows keep their numbers, and later loads leave them out.
    """
    act = client_of(endpoint, timeout_s=timeout_s).forget(
        name,
        where,
        reason=reason,
        dry_run=dry_run,
        keep_condition=keep_condition,
        timeout_s=timeout_s,
        on_wait=_Told(),
    )
    if as_json or not act.number:
        shown = {**asdict(act), "num_rows": act.num_rows}
        if as_json:
            print_json(shown)
            return
        for fingerprint, rows in act.versions.items():
            show_line(f"version {fingerprint}: {rows} rows")
        show_line("nothing was erased" if not act.num_rows else "a dry run: nothing was erased")
        return
    show_line(act.attestation)


class _Told:
    """Says what a command waits for, once for each reason."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, reason: str) -> None:
        if reason != self._last:
            typer.echo(f"waiting: {reason}", err=True)
        self._last = reason


def forgotten(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of a dataset.")] = "",
    endpoint: Endpoint = None,
    timeout_s: TimeoutS = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the acts that forgot rows."""
    acts = client_of(endpoint, timeout_s=timeout_s).forgotten(name)
    if as_json:
        print_json([{**asdict(act), "num_rows": act.num_rows} for act in acts])
        return
    show_rows(
        ["act", "dataset", "rows", "versions", "by", "state", "reason"],
        [
            [
                str(act.number),
                act.dataset,
                str(act.num_rows),
                str(sum(rows > 0 for rows in act.versions.values())),
                act.by,
                "done" if act.done else "; ".join(act.waits) or "begun",
                act.reason,
            ]
            for act in acts
        ],
    )


def verify_attestation(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An attestation.")],
    public_key: Annotated[str, typer.Option(help="Key of the cache, in hexadecimal digits.")] = "",
) -> None:
    """Check the signature of an attestation, offline."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    content = verify(text, public_key)
    versions = {name: each["erased_rows"] for name, each in content["versions"].items()}
    show_line(
        f"valid: act {content['number']} of cache {content['cache']} erased rows of "
        f"{content['dataset']!r}: {json.dumps(versions)}, signed with {content['public_key']}"
    )
