"""Where texts are tokenised."""

import threading
from pathlib import Path

from octavo.config import EngineConfig, ServerConfig
from octavo.server.served_model import LONG_TEXT, ServedModel, TextSide, load_text_side
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.server.running import make_tokenizer_folder


class WatchedTokenizer(Tokenizer):
    """Notes which thread encodes."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        return [5]


def served(tokenizer: Tokenizer) -> ServedModel:
    text = TextSide(tokenizer, ChatTemplate(None, {}), has_chat_template=False)
    return ServedModel(name="m", root="m", text=text, client=None, info=None)  # type: ignore[arg-type]


async def test_a_long_text_is_tokenised_in_another_thread() -> None:
    tokenizer = WatchedTokenizer()
    model = served(tokenizer)
    await model.text_prompt("short")
    await model.text_prompt("x" * LONG_TEXT)
    short, long = tokenizer.threads
    assert short is threading.current_thread()
    assert long is not threading.current_thread()


def test_options_replace_tokenizer_and_template(tmp_path: Path) -> None:
    folder = str(make_tokenizer_folder(tmp_path))
    config = EngineConfig(model="nowhere", tokenizer=folder)
    own = load_text_side(config, ServerConfig())
    assert own.chat_template.render([{"role": "user", "content": "x"}]) == "<s>user\nx</s><s>assistant\n"
    other = load_text_side(config, ServerConfig(chat_template="{{ messages[0]['content'] }}!"))
    assert other.chat_template.render([{"role": "user", "content": "x"}]) == "x!"
