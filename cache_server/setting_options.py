"""Options of a command from the settings of a model: each is declared once, in the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cache_server.config import Flag

Command = TypeVar("Command", bound=Callable[..., None])


def with_settings_of(model: type[BaseModel]) -> Callable[[Command], Command]:
    """Adds an option to a command for each setting of ``model`` that has a `Flag`.

    The command takes them as ``**settings``, as texts: the model checks them. See `given`.
    """

    def extend(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        parameters = [*parameters_of(model), *own]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return extend


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that have no value: the model has their defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def parameters_of(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    """The parameters of a command for the settings of ``model`` that have a `Flag`."""
    for name, info in model.model_fields.items():
        flag = next((each for each in info.metadata if isinstance(each, Flag)), None)
        if flag is None:
            continue
        option = flag.name or f"--{name.replace('_', '-')}"
        kind = _kind(info)
        if kind is bool:
            names = [f"{option}/--no-{option[2:]}"] if info.default else [option]
            metavar, default = None, info.default
        else:
            names, metavar = [option], flag.metavar or f"<{_value_name(info.annotation)}>"
            default = str(info.default) if isinstance(info.default, str | int | float) else None
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if info.is_required() else default,
            annotation=Annotated[
                kind if default is not None or info.is_required() else kind | None,
                typer.Option(*names, help=flag.text, metavar=metavar),
            ],
        )


def _kind(info: FieldInfo) -> Any:
    """What typer reads: a flag, several texts or one; the model makes a value of it."""
    types = set(_types(info.annotation))
    if types == {bool}:
        return bool
    return list[str] if tuple in types else str


def _value_name(annotation: Any) -> str:
    """``int``, ``float`` or ``str``, as the help shows it."""
    return next((kind.__name__ for kind in _types(annotation) if kind in (int, float)), "str")


def _types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation names, such as ``tuple`` and ``str`` of ``tuple[str, ...]``."""
    parts = get_args(annotation)
    yield get_origin(annotation) or annotation
    for part in parts:
        yield from _types(part)
