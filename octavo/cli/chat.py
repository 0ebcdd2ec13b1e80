"""`octavo chat`: a conversation in the terminal, with a running server or with a model loaded in this process."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from octavo.cli.arguments import Parser, add_config_options, add_model_option, config_values, model_argument
from octavo.cli.retired import add_retired_options
from octavo.errors import OctavoError
from octavo.options import EngineConfig

__all__ = ["configure"]

Messages = list[dict[str, str]]


class ChatModel(Protocol):
    def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """Yield the answer's text as it is generated. Closing the iterator ends the request."""
        ...


class RemoteModel:
    """A model behind an OpenAI server."""

    def __init__(self, url: str, name: str | None, api_key: str | None, options: dict[str, Any]) -> None:
        """Without a name, the first model that the server lists. Raises ServerError."""
        from octavo.cli.http_client import HttpClient
        from octavo.cli.openai_stream import first_model

        self.client = HttpClient(url, api_key)
        self.name = name or first_model(asyncio.run(self.client.get("/v1/models")))
        self.options = options

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        from octavo.cli.openai_stream import decode_event

        body = {"model": self.name, "messages": messages, "stream": True, **self.options}
        async with aclosing(self.client.events("/v1/chat/completions", body)) as events:
            async for data in events:
                yield decode_event(data).text


class LocalModel:
    """A model loaded in this process."""

    def __init__(self, model: str, engine_options: dict[str, Any], options: dict[str, Any]) -> None:
        from octavo.llm import LLM
        from octavo.sampling_params import SamplingParams

        self.params = SamplingParams(**({"max_tokens": None} | options))
        self.llm = LLM(model, **engine_options)

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        pieces = self.llm.stream_chat(messages, self.params)
        try:
            for piece in pieces:
                yield piece
                await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one
        finally:
            pieces.close()


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.description = (
        "Talk to a model: a running server's (--url), or MODEL, loaded in this process. "
        "Ctrl-C stops an answer, Ctrl-D leaves."
    )
    add_model_option(parser)
    parser.add_argument("--url", help="Address of a running server. Default, without MODEL: http://127.0.0.1:8000/v1.")
    parser.add_argument("--model-name", metavar="NAME", help="Which of the server's models; default: its first.")
    parser.add_argument("--api-key", metavar="KEY", help="Default: the environment variable OPENAI_API_KEY.")
    parser.add_argument("--system-prompt", "--system", metavar="TEXT", help="The conversation's system message.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Send one message, print the answer and leave.")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest token.")
    parser.add_argument("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens with this total.")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer; default: what the context allows.")
    add_config_options(parser, EngineConfig, "engine, for a MODEL loaded in this process", skip=("model",))
    add_retired_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chat_model = _open(args)
    messages: Messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    if args.quick is not None:
        return 0 if _exchange(chat_model, messages, args.quick) else 1
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and history
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if text:
            _exchange(chat_model, messages, text)


def _open(args: argparse.Namespace) -> ChatModel:
    names = ("temperature", "top_p", "max_tokens")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    model = model_argument(args)
    if model is not None and args.url is None:
        return LocalModel(model, config_values(args, EngineConfig), options)
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return RemoteModel(args.url or "http://127.0.0.1:8000/v1", args.model_name or model, api_key, options)


def _exchange(chat_model: ChatModel, messages: Messages, text: str) -> bool:
    """One message and its answer, printed and added to `messages`. False: it failed, and the message is taken back."""
    messages.append({"role": "user", "content": text})
    pieces: list[str] = []
    try:
        asyncio.run(_print_answer(chat_model.answer(messages), pieces))
    except asyncio.CancelledError:
        print(" (stopped)", end="")
    except OctavoError as error:
        if pieces:
            print()
        print(f"octavo: error: {error}", file=sys.stderr)
        messages.pop()
        return False
    print()
    messages.append({"role": "assistant", "content": "".join(pieces)})
    return True


async def _print_answer(answer: AsyncGenerator[str, None], pieces: list[str]) -> None:
    """Print and collect the answer's pieces until it ends, or until Ctrl-C cancels it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with aclosing(answer) as stream:
        async for piece in stream:
            print(piece, end="", flush=True)
            pieces.append(piece)
