"""Where a model's tokenizer and chat template come from."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.text.text_side import load_text_side
from tests.server.running import make_tokenizer_folder


def test_options_replace_tokenizer_and_template(tmp_path: Path) -> None:
    folder = str(make_tokenizer_folder(tmp_path))
    config = EngineConfig(model="nowhere", tokenizer=folder)
    own = load_text_side(config)
    assert own.chat_template.render([{"role": "user", "content": "x"}]) == "<s>user\nx</s><s>assistant\n"
    other = load_text_side(config, "{{ messages[0]['content'] }}!")
    assert other.chat_template.render([{"role": "user", "content": "x"}]) == "x!"


def test_a_template_of_the_model_is_chosen_by_its_name(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = {"default": "plain", "tool_use": "with tools"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    config = EngineConfig(model="nowhere", tokenizer=str(folder))
    for name, source in [(None, "plain"), ("tool_use", "with tools"), ("rag", "with documents")]:
        assert load_text_side(config, name).chat_template.source == source
    with pytest.raises(ConfigError, match="templates named default, tool_use, rag"):
        load_text_side(config, "nothing")
