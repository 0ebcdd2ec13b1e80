"""Where texts are tokenised."""

import threading

from octavo.server.served_model import LONG_TEXT, ServedModel
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_side import TextSide
from octavo.text.tokenizer import Tokenizer


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
