"""Grammars: masks over a real vocabulary."""

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import InvalidRequestError
from octavo.sampling_params import MAX_STRUCTURE_CHARACTERS, StructuredOutputs
from octavo.text import grammar
from octavo.text.grammar import GrammarCompiler, Matcher
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_models import make_tokenizer

VOCAB_SIZE = 400  # more rows than tokens
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return load_tokenizer(folder, None)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])


def allowed(matcher: Matcher) -> list[int]:
    return [i for i in range(8 * len(matcher.mask)) if matcher.mask[i // 8] >> i % 8 & 1]


def finished(matcher: Matcher, seed: int = 0, num_tokens: int = 500) -> list[int]:
    """A random walk to the end."""
    rng, output = random.Random(seed), list[int]()
    while allowed(matcher) != [EOS]:
        output.append(rng.choice([token_id for token_id in allowed(matcher) if token_id != EOS]))
        matcher.accept(output[-1])
        assert len(output) < num_tokens
    return output


def text_of(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()


def test_after_the_end_only_the_end_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(choice=("ab",)))
    assert all(text_of(tokenizer, [token_id]) in ("a", "ab") for token_id in allowed(matcher))
    finished(matcher)
    for _ in range(2):
        assert allowed(matcher) == [EOS]
        matcher.accept(EOS)


def test_rows_of_the_embedding_without_a_token_are_never_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(StructuredOutputs(regex="(?s:.*)"))
    assert max(allowed(matcher)) < len(tokenizer) < VOCAB_SIZE
    assert 8 * len(matcher.mask) >= VOCAB_SIZE


@pytest.mark.parametrize("text", ["</s>", "a<s>b", "plain", 'q"\\\n', "", "naïve 😀", ".*", "\x01"])
def test_a_text_is_spelt_by_ordinary_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    for structure in (StructuredOutputs(choice=(text,)), StructuredOutputs(json={"const": text})):
        token_ids = finished(compiler.compile(structure))
        assert not any(map(tokenizer.is_special, token_ids))
        spelt = text_of(tokenizer, token_ids)
        assert (json.loads(spelt) if structure.json else spelt) == text


def test_a_tokenizer_that_puts_a_space_first_spells_the_text_without_it(tmp_path: Path) -> None:
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "o", "n", "e", "on", "▁one"]
    merges = [("o", "n"), ("▁", "one")]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "one"])}
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, [*merges[:1], ("on", "e"), *merges[1:]], byte_fallback=True))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens(["<s>", "</s>"])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, None)
    assert text_of(tokenizer, tokenizer.encode("one")) == " one"
    token_ids = finished(
        GrammarCompiler(tokenizer, len(vocabulary), [EOS]).compile(StructuredOutputs(choice=("one one",)))
    )
    assert text_of(tokenizer, token_ids) == "one one"


def test_a_schema_can_not_ask_for_something_else_than_json(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"x-guidance": {"item_separator": ";", "lenient": True}, "type": "array", "minItems": 2, "maxItems": 2}
    text = text_of(tokenizer, finished(compiler.compile(StructuredOutputs(json=schema | {"items": {"const": 1}}))))
    assert json.loads(text) == [1, 1]


def test_white_space_can_not_go_on_for_ever(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(json_object=True))
    (space,) = tokenizer.encode(" ")
    matcher.accept(tokenizer.encode("{")[0])
    matcher.accept(space)
    assert space not in allowed(matcher)


def test_an_unknown_format_is_an_annotation(compiler: GrammarCompiler) -> None:
    data = {"format": "made-up"}
    schema = {"properties": {"format": {"type": "string", "format": "made-up"}}, "default": data}
    compiler.compile(StructuredOutputs(json=schema))
    compiler.compile(StructuredOutputs(json={"const": data}))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": "false"}, "must be an object"),
        ({"json": {"type": "wibble"}}, "Invalid type: wibble"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "does not fetch"),
        ({"json": {"$ref": "#"}}, "nothing satisfies it"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nope"}, "unknown name"),
        ({"grammar": "root ::= ("}, "Expected"),
    ],
)
def test_the_compiler_s_message_says_what_is_wrong(
    compiler: GrammarCompiler, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiler.compile(StructuredOutputs(**structure))
    assert "<state>" not in caught.value.message
    assert caught.value.param == "structured_outputs"


def test_requests_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structure = StructuredOutputs(regex="[a-z]{8}|[0-9]{8}")
    first = compiler.compile(structure)
    second, third = compiler.find(structure), compiler.find(structure)
    assert second is not None
    assert third is not None
    outputs = [text_of(tokenizer, finished(matcher, seed)) for seed, matcher in enumerate((first, second))]
    assert all(re.fullmatch(structure.regex or "", output) for output in outputs)
    assert outputs[0] != outputs[1]
    assert allowed(third) == allowed(compiler.compile(structure)) != allowed(first)


def test_the_grammars_that_were_not_asked_for_longest_are_forgotten(compiler: GrammarCompiler) -> None:
    structures = [StructuredOutputs(regex=f"x{{{i + 1}}}") for i in range(grammar.MAX_COMPILED + 1)]
    for structure in structures:
        compiler.compile(structure)
    assert compiler.find(structures[0]) is None
    assert all(compiler.find(structure) is not None for structure in structures[1:])


def test_a_grammar_that_takes_ever_longer_is_given_up(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "FREE_CPU_S", 0.1)
    monkeypatch.setattr(grammar, "CPU_S_A_TOKEN", 0.0)
    matcher = compiler.compile(StructuredOutputs(grammar='start: start start | "a" | '))
    (letter,) = tokenizer.encode("a")

    def go_on() -> None:
        for _ in range(1000):
            matcher.accept(letter)

    with pytest.raises(InvalidRequestError, match="takes too long"):
        go_on()


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": ()},
        {"choice": ("a", 5)},
        {"choice": "ab"},
        {"json": 5},
        {"regex": "a" * (MAX_STRUCTURE_CHARACTERS + 1)},
    ],
)
def test_what_is_no_structure_is_refused_at_once(structure: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        StructuredOutputs(**structure)
    assert caught.value.param == "structured_outputs"
