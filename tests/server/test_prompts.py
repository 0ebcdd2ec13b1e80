"""Where texts are tokenised."""

import threading

from octavo.server.prompts import LONG_TEXT, PromptMaker
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


async def test_a_long_text_is_tokenised_in_another_thread() -> None:
    tokenizer = WatchedTokenizer()
    prompts = PromptMaker(TextSide(tokenizer, ChatTemplate(None, {}), has_chat_template=False))
    await prompts.of_text("short")
    await prompts.of_text("x" * LONG_TEXT)
    short, long = tokenizer.threads
    assert short is threading.current_thread()
    assert long is not threading.current_thread()
