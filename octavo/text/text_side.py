"""TextSide: the tokenizer and the chat template of a model, loaded from its files or from those that options name."""

from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.open import open_text
from octavo.options import EngineConfig
from octavo.text.chat_template import ChatTemplate, load_chat_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["TextSide", "load_model_tokenizer", "load_text_side"]


@dataclass(frozen=True, slots=True)
class TextSide:
    """The part of a model that turns text into token ids and back."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    has_chat_template: bool


def load_text_side(config: EngineConfig, chat_template: str | None = None) -> TextSide:
    """`chat_template`: a template, a file that holds one, or the name of one of the model's, instead of its default."""
    tokenizer = load_model_tokenizer(config)
    source = (
        tokenizer.chat_template
        if chat_template is None
        else load_chat_template(chat_template, tokenizer.chat_templates)
    )
    return TextSide(tokenizer, ChatTemplate(source, tokenizer.special_tokens), source is not None)


def load_model_tokenizer(config: EngineConfig) -> Tokenizer:
    """The model's tokenizer, or the one that --tokenizer names."""
    if config.tokenizer is not None and Path(config.tokenizer).is_dir():  # it need not hold a model
        return load_tokenizer(Path(config.tokenizer), None)
    return load_tokenizer(*open_text(config.tokenizer or config.model, config.download_dir, config.revision))
