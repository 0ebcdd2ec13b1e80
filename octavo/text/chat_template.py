"""Chat templates: messages to the prompt's text, rendered in a sandbox as transformers renders them.

Knows nothing of token ids. A rendered prompt has its special tokens written out, BOS included: encode it with
`add_special_tokens=False`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

__all__ = ["ChatTemplate", "Message", "load_chat_template"]

Message = Mapping[str, Any]

CONTINUE_MARK = "\ue000octavo continues here\ue001 "  # its last character shows whether the template strips content


MAX_KNOWN_ROLES = 64


class ChatTemplate:
    """A model's chat template, compiled. `source` is None for a model that has none: rendering then says what to do.

    `special_tokens` ("bos_token", …) are variables of the template. `now` is what `strftime_now` formats. Raises
    ConfigError for a template with a syntax error.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._template = None if source is None else _compile(source)
        self._uses = NO_USES if source is None else _uses_of_content(source)
        self._shown: dict[str, bool] = {}  # by role
        self.source = source

    def shows(self, role: str) -> bool:
        """Whether a message of this role gets into the prompt, as far as a trial shows: some templates drop those they
        do not know. One that a template refuses is not dropped."""
        if role not in self._shown:
            if len(self._shown) > MAX_KNOWN_ROLES:
                self._shown.clear()
            self._shown[role] = self._template is None or self._try_to_show(role)
        return self._shown[role]

    def _try_to_show(self, role: str) -> bool:
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        for others in (before, []):
            try:
                if CONTINUE_MARK.strip() in self.render([*others, {"role": role, "content": CONTINUE_MARK}]):
                    return True
            except InvalidRequestError:
                return True
        return False

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in (self.source or "")

    def render(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` are further variables of the template; they can replace special tokens, nothing else.

        Messages come in the form that the template takes: parts of text are joined unless it goes through them,
        absent content is empty unless it asks for none, "developer" is "system" where it does not know that role.
        Raises InvalidRequestError, with the template's own message where it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template. Start the server with --chat-template, or send a plain prompt to "
                "/v1/completions.",
                param="messages",
            )
        if not messages:
            raise InvalidRequestError("messages must hold at least one message.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true: one goes on with the last "
                "message, the other begins a new one.",
                param="continue_final_message",
            )
        variables = {
            **self._special_tokens,
            **kwargs,
            "strftime_now": lambda pattern: self._now().strftime(pattern),
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        chat = [self._prepared(message) for message in messages]
        final = _mark_end(chat[-1], messages[-1]) if continue_final_message else ""
        try:
            prompt = self._template.render(variables | {"messages": chat})
        except Exception as error:  # a template can fail in any way; none of them is ours
            prompt = self._render_plainly(variables, chat, error)
        return _cut_at_mark(prompt, final) if continue_final_message else prompt

    def _render_plainly(self, variables: dict[str, Any], chat: list[dict[str, Any]], error: Exception) -> str:
        """Once more, without what the template may have stumbled over: content that is none, arguments of calls that
        are no objects. Raises InvalidRequestError."""
        assert self._template is not None
        plain = list(map(_plain, chat))
        refusal = InvalidRequestError(f"The chat template failed: {error}", param="messages")
        if plain == chat:
            raise refusal from error
        try:
            return self._template.render(variables | {"messages": plain})
        except Exception:
            raise refusal from error

    def _prepared(self, message: Message) -> dict[str, Any]:
        """A copy without absent (None) fields, its role and content as the template wants them."""
        prepared = {key: value for key, value in message.items() if value is not None}
        if prepared.get("role") == "developer" and "developer" not in (self.source or ""):
            prepared["role"] = "system"
        content = prepared.get("content")
        if content is None:
            prepared["content"] = None if self._uses.asks_for_none else ""
        elif isinstance(content, list):
            prepared["content"] = [dict(part) for part in content] if self._uses.goes_through else _joined_text(content)
        return prepared


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    plain = message | {"content": "" if message["content"] is None else message["content"]}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def load_chat_template(argument: str, named: Mapping[str, str] | None = None) -> str:
    """The source that `--chat-template` names: one of the model's `named` ones, a file, or the template itself.

    Raises ConfigError for none of these.
    """
    if named and argument in named:
        return named[argument]
    try:
        path = Path(argument)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # a template is no file name: too long, or with a NUL
        pass
    if not any(mark in argument for mark in ("{{", "{%", "\n")):
        names = f" The model has templates named {', '.join(named)}." if named else ""
        raise ConfigError(f"--chat-template {argument!r} is neither a file that exists nor a Jinja template.{names}")
    return argument


def _joined_text(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"messages: content parts must be of type 'text' for this model, got {kind!r}.", param="messages"
            )
    return "\n".join(texts)


def _mark_end(message: dict[str, Any], given: Message) -> str:
    """Append the mark to the message's text, if it was `given` one; return that text."""
    content = message["content"]
    if isinstance(content, str) and given.get("content") is not None:
        message["content"] = content + CONTINUE_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + CONTINUE_MARK
            return text
    raise InvalidRequestError(
        "continue_final_message is set, but the last message has no text to go on with.", param="continue_final_message"
    )


def _cut_at_mark(prompt: str, final: str) -> str:
    mark = CONTINUE_MARK.rstrip()
    end = prompt.rfind(mark)
    if end < 0 or final.strip() not in prompt:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template leaves the last message out of the prompt.",
            param="continue_final_message",
        )
    keeps_space = prompt.startswith(CONTINUE_MARK, end)
    return prompt[:end] if keeps_space else prompt[:end].rstrip()


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says, for training; here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(source: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template has a syntax error in line {error.lineno}: {error.message}. --chat-template can give "
            "another one."
        ) from error


@dataclass(frozen=True, slots=True)
class ContentUses:
    """What a template does with a message's content."""

    goes_through: bool = False
    """It takes it part by part: `{% for part in message.content %}`."""
    asks_for_none: bool = False
    """`{% if message.content is none %}`, or is not, or a comparison with none."""


NO_USES = ContentUses()


@lru_cache(maxsize=64)
def _uses_of_content(source: str) -> ContentUses:
    """Followed through filters, names that are set to the content, and macros that are called with it."""
    from jinja2 import nodes

    tree = _environment().parse(source)
    parameters = {macro.name: [argument.name for argument in macro.args] for macro in tree.find_all(nodes.Macro)}
    bindings = [(a.target.name, a.node) for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            bindings += zip(parameters.get(call.node.name, ()), call.args, strict=False)
    aliases: set[str] = set()
    while found := {name for name, value in bindings if _is_content(value, aliases)} - aliases:
        aliases |= found
    tested = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    for comparison in tree.find_all(nodes.Compare):
        if any(isinstance(operand.expr, nodes.Const) and operand.expr.value is None for operand in comparison.ops):
            tested.append(comparison.expr)
    return ContentUses(
        goes_through=any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For)),
        asks_for_none=any(_is_content(node, aliases) for node in tested),
    )


def _is_content(node: "nodes.Node | None", aliases: set[str]) -> bool:
    from jinja2 import nodes

    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return node.name in aliases
        case nodes.Filter():
            return _is_content(node.node, aliases)
    return False
