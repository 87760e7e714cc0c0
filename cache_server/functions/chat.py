"""Chat messages -> tokens and a mask of what the assistant said, by a template in Jinja's sandbox.

A template sees what it sees in Transformers: the names of its sandbox, messages without the keys
that are null, and ``{% generation %}``, whose characters are the assistant's. It does not see the
time of day, because a function gives the same at any time. `tests/integration/test_chat_tokens.py`
compares tokens and masks with ``apply_chat_template(return_assistant_tokens_mask=True)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import pyarrow as pa
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Encoding

from cache_server.functions.declared import Column, Compute, Function, Option
from cache_server.functions.tokens import library_version, token_lists, tokenizer_of, tokens_type

_MASK = pa.list_(pa.uint8())
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # that a template may name


def chat_tokens() -> Function:
    """``chat_tokens(messages, 'tokenizer.json', 'template.jinja')``: tokens and loss mask."""
    return Function(
        "chat_tokens",
        f"{library_version()}+jinja2-{version('jinja2')}",
        {
            "messages": Column(),
            "tokenizer": Option("json file"),
            "template": Option("text file"),
            "tools": Column(is_optional=True),
            "add_generation_prompt": Option("boolean", False),
            "max_length": Option("integer", None),
            **{name: Option("text", None) for name in _SPECIAL},
        },
        _made,
        _result_type,
        "struct<tokens: list<uint16 or uint32>, loss_mask: list<uint8>>",
        text="tokens of a chat, and 1 for those between {% generation %} and {% endgeneration %}",
    )


def _result_type(types: Mapping[str, pa.DataType], options: Mapping[str, Any]) -> pa.DataType:
    for name, dtype in types.items():
        if not (_is_text(dtype) or pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
            raise ValueError(f"{name} must be a list of structs, or a text of JSON, got {dtype}")
    ChatTemplate(options["template"])
    tokens = tokens_type(tokenizer_of(options["tokenizer"], options["max_length"]))
    return pa.struct([pa.field("tokens", tokens), pa.field("loss_mask", _MASK)])


def _made(options: Mapping[str, Any]) -> Compute:
    tokenizer = tokenizer_of(options["tokenizer"], options["max_length"])
    template = ChatTemplate(options["template"])
    dtype = tokens_type(tokenizer)
    given = {name: options[name] for name in _SPECIAL if options[name] is not None}
    given["add_generation_prompt"] = bool(options["add_generation_prompt"])

    def compute(messages: pa.Array, tools: pa.Array | None = None) -> pa.Array:
        chats = _values(messages)
        of_tools = [None] * len(chats) if tools is None else _values(tools)
        pairs = zip(chats, of_tools, strict=True)
        rendered = [template.render(chat, tools, given) for chat, tools in pairs]
        found = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        masks = [mask_of(each, spans) for each, (_, spans) in zip(found, rendered, strict=True)]
        tokens = token_lists([each.ids for each in found], dtype)
        return pa.StructArray.from_arrays(
            [tokens, token_lists(masks, _MASK)], ["tokens", "loss_mask"]
        )

    return compute


def mask_of(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> Sequence[int]:
    """1 for each token of the spans of characters; as Transformers counts them."""
    mask = bytearray(len(encoding))
    for start, stop in spans:
        first = encoding.char_to_token(start)
        if first is None:  # truncated
            break
        last = encoding.char_to_token(stop - 1)
        # As there: a last token with the number 0, too, means the rest.
        end = last + 1 if last else len(mask)
        mask[first:end] = b"\1" * max(0, end - first)
    return mask


class ChatTemplate:
    """A compiled template.

    Raises:
        ValueError: it is no template, or marks nothing of the assistant.
    """

    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        try:
            marks = any(environment.parse(text).find_all(nodes.CallBlock))
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the file is no chat template: {error}") from None
        if not marks:
            raise ValueError(
                "the chat template marks no tokens to learn: put {% generation %} and "
                "{% endgeneration %} around what the assistant says"
            )
        # Jinja copies an extension for each environment.
        self._generation: _Generation = environment.extensions[_Generation.identifier]  # type: ignore[assignment]

    def render(
        self, messages: Any, tools: Any, given: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the spans of characters between the marks."""
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("each message must be an object with keys such as role and content")
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        self._generation.blocks, self._generation.spans = blocks, spans
        chat = [_with_reasoning(_without_nulls(message)) for message in messages]
        for block in self._template.generate(messages=chat, tools=tools, documents=None, **given):
            blocks.append(block)
        return "".join(blocks), spans


class _Generation(jinja2.ext.Extension):
    """Notes which characters stand between ``{% generation %}`` and ``{% endgeneration %}``."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] = []
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_noted")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _noted(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(text)))
        return text


class _Dict:
    """``dict`` of a template, without the attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` of a template, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be a name in a template
        self, *rest = args
        given = dict(*rest, **values)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}: rename it")


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype)) or bool(
        pa.types.is_string_view(dtype)
    )


def _values(column: pa.Array) -> list[Any]:
    """Lists of structs as Python values without the fields that are null; or texts of JSON."""
    if _is_text(column.type):
        return [None if text is None else json.loads(text) for text in column.to_pylist()]
    return [_bare(value) for value in column.to_pylist()]


def _bare(value: Any) -> Any:
    """A value of Arrow, where a struct has all fields that any of its rows has."""
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items() if each is not None}
    return [_bare(each) for each in value] if isinstance(value, list) else value


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name that templates read."""
    values: Iterator[Any] = (message[name] for name in _REASONING if name in message)
    if (reasoning := next(values, None)) is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
