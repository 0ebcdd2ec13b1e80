"""Where a model's tokenizer and chat template come from."""

from pathlib import Path

from octavo.config import EngineConfig
from octavo.text.text_side import load_text_side
from tests.server.running import make_tokenizer_folder


def test_options_replace_tokenizer_and_template(tmp_path: Path) -> None:
    folder = str(make_tokenizer_folder(tmp_path))
    config = EngineConfig(model="nowhere", tokenizer=folder)
    own = load_text_side(config)
    assert own.chat_template.render([{"role": "user", "content": "x"}]) == "<s>user\nx</s><s>assistant\n"
    other = load_text_side(config, "{{ messages[0]['content'] }}!")
    assert other.chat_template.render([{"role": "user", "content": "x"}]) == "x!"
