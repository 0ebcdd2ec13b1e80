"""The detokenizer against the naive algorithm: join all bytes, decode, look for stops from the start."""

import codecs
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer


class Pieces:
    """A vocabulary that is a list of byte strings; ids from `first_special` on are special."""

    def __init__(self, pieces: Sequence[bytes], first_special: int | None = None) -> None:
        self._pieces = pieces
        self._first_special = len(pieces) if first_special is None else first_special

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id >= self._first_special


@dataclass(frozen=True)
class Outcome:
    text: str
    stopped_by: str | None
    num_tokens: int


def naive(pieces: Sequence[bytes], stops: Sequence[str], include: bool) -> Outcome:
    text = b"".join(pieces).decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            stop = max(ending, key=len)
            decided = [n for n in range(1, len(pieces) + 1) if len(decoded(pieces[:n])) >= end]
            return Outcome(text[: end if include else end - len(stop)], stop, min(decided, default=len(pieces)))
    return Outcome(text, None, len(pieces))


def decoded(pieces: Sequence[bytes]) -> str:
    """The characters that are settled whatever bytes follow."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(pieces))


def run(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> Outcome:
    deltas = [detokenizer.append(chunk) for chunk in chunks]
    deltas.append(detokenizer.finish())
    text = "".join(deltas)
    assert detokenizer.text == text
    return Outcome(text, detokenizer.stopped_by, detokenizer.num_tokens)


def split(items: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


# Few letters, so that stops happen; characters of two to four bytes, cut anywhere; and bytes that are not UTF-8.
wide = "ab \né漢🦊\ufffd"
texts = st.text(alphabet="ab", max_size=30) | st.text(alphabet=wide, max_size=30)
byte_runs = (
    texts.map(str.encode)
    | st.binary(max_size=8)
    | st.lists(st.sampled_from(b"a\xf0\x9f\xa6\x8a\xed\xa0\xc3\x80"), max_size=8).map(bytes)
)
cuts = st.lists(st.integers(min_value=0), max_size=40)


@st.composite
def token_sequences(draw: st.DrawFn) -> list[bytes]:
    whole = b"".join(draw(st.lists(byte_runs, max_size=5)))
    return [bytes(chunk) for chunk in split(whole, draw(cuts))]


stop_string = st.text(alphabet="ab", min_size=2, max_size=6) | st.text(alphabet=wide, min_size=1, max_size=6)
stop_strings = st.lists(stop_string, max_size=4)


@settings(max_examples=600, deadline=None)
@given(token_sequences(), stop_strings, st.booleans(), cuts)
def test_any_split_gives_the_naive_text_stop_and_count(
    pieces: list[bytes], stops: list[str], include: bool, where: list[int]
) -> None:
    detokenizer = Detokenizer(Pieces(pieces), stop=stops, include_stop_str_in_output=include)
    assert run(detokenizer, split(range(len(pieces)), where)) == naive(pieces, stops, include)


@settings(max_examples=300, deadline=None)
@given(token_sequences(), stop_strings)
def test_exactly_the_undecided_tail_is_held_back(pieces: list[bytes], stops: list[str]) -> None:
    detokenizer = Detokenizer(Pieces(pieces), stop=stops)
    for n in range(len(pieces)):
        detokenizer.append([n])
        if detokenizer.stopped_by is not None:
            return
        settled = decoded(pieces[: n + 1])
        beginnings = [k for stop in stops for k in range(len(stop)) if settled.endswith(stop[:k])]
        assert detokenizer.text == settled[: len(settled) - max(beginnings, default=0)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=60), cuts, st.booleans())
def test_deltas_of_real_tokens_join_to_the_decoded_whole(
    smollm: Tokenizer, token_ids: list[int], where: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(smollm, skip_special_tokens=skip)
    assert run(detokenizer, split(token_ids, where)).text == smollm.decode(token_ids, skip_special_tokens=skip)


def test_no_replacement_character_appears_within_valid_text(smollm: Tokenizer, awkward: str) -> None:
    detokenizer = Detokenizer(smollm, skip_special_tokens=False)
    deltas = [detokenizer.append([token_id]) for token_id in smollm.encode(awkward)]
    assert "".join(deltas) == awkward
    assert detokenizer.finish() == ""


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(Pieces([b"a", b"\xf0\x9f", b"\xa6"]))
    assert [detokenizer.append([i]) for i in range(3)] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_stop_inside_a_token_cuts_the_text_there() -> None:
    detokenizer = Detokenizer(Pieces([b"one; two", b" three"]), stop=[";"])
    assert detokenizer.append([0, 1]) == "one"
    assert (detokenizer.stopped_by, detokenizer.num_tokens, detokenizer.finish()) == (";", 1, "")


def test_a_stop_across_tokens_is_never_partly_sent() -> None:
    detokenizer = Detokenizer(Pieces([b"yes EN", b"D or EN", b"DED"]), stop=["ENDED"])
    assert [detokenizer.append([i]) for i in range(3)] == ["yes ", "END or ", ""]
    assert (detokenizer.stopped_by, detokenizer.num_tokens) == ("ENDED", 3)


def test_a_stop_that_begins_within_a_failed_beginning_is_found() -> None:
    detokenizer = Detokenizer(Pieces([b"a", b"b", b"c"]), stop=["aab", "bbac"])
    assert [detokenizer.append([i]) for i in (1, 1, 1, 0, 0, 0, 1)] == ["", "", "b", "", "bb", "a", ""]
    assert detokenizer.stopped_by == "aab"


def test_the_stop_string_is_sent_when_asked_for() -> None:
    detokenizer = Detokenizer(Pieces([b"ab", b"cd"]), stop=["bc"], include_stop_str_in_output=True)
    assert [detokenizer.append([0]), detokenizer.append([1])] == ["a", "bc"]


def test_the_stop_completed_first_wins_and_the_longest_of_those_that_end_together() -> None:
    pieces = Pieces([b"xabcd"])
    for stops, expected in ((["abcd", "bc"], ("xa", "bc")), (["bc", "abc"], ("x", "abc"))):
        detokenizer = Detokenizer(pieces, stop=stops)
        assert (detokenizer.append([0]), detokenizer.stopped_by) == expected


def test_tokens_after_a_stop_are_neither_text_nor_counted() -> None:
    detokenizer = Detokenizer(Pieces([b"a.", b"b"]), stop=["."])
    assert [detokenizer.append([0]), detokenizer.append([1, 1]), detokenizer.finish()] == ["a", "", ""]
    assert detokenizer.num_tokens == 1


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_text_only_when_asked_for(skip: bool, expected: str) -> None:
    detokenizer = Detokenizer(Pieces([b"a", b"b", b"<end>"], first_special=2), skip_special_tokens=skip)
    assert run(detokenizer, [[0, 2, 1]]) == Outcome(expected, None, 3)


def test_a_long_output_costs_no_more_per_token_at_its_end() -> None:
    generator = random.Random(0)
    detokenizer = Detokenizer(Pieces([b"a", b"b", "🦊".encode()]), stop=["a" * 60 + "c", "ba" * 40 + "c"])
    begin = time.perf_counter()
    for _ in range(200_000):
        detokenizer.append((generator.randrange(3),))
    assert time.perf_counter() - begin < 10  # about half a second; quadratic work would take many minutes
    assert detokenizer.num_tokens == 200_000


@pytest.mark.parametrize(
    ("min_tokens", "text", "stopped_by"),
    [(0, "x", "ab"), (2, "x", "ab"), (3, "xabx", "ab"), (4, "xabx", "ab"), (5, "xabx", "ab"), (6, "xabxab", None)],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_completed_within_min_tokens_does_not_count(
    min_tokens: int, text: str, stopped_by: str | None, at_once: bool
) -> None:
    detokenizer = Detokenizer(Pieces([b"x", b"a", b"b"]), stop=["ab"], min_tokens=min_tokens)
    tokens = [0, 1, 2, 0, 1, 2]
    assert run(detokenizer, [tokens] if at_once else [[token] for token in tokens]) == Outcome(
        text, stopped_by, {None: 6, "ab": 3 if text == "x" else 6}[stopped_by]
    )


def test_a_stop_string_begun_within_min_tokens_counts_when_it_ends_after() -> None:
    detokenizer = Detokenizer(Pieces([b"a"]), stop=["aa"], min_tokens=2)
    assert run(detokenizer, [[0], [0], [0], [0]]) == Outcome("a", "aa", 3)


def test_a_stop_string_that_is_a_hidden_special_token_ends_the_text() -> None:
    pieces = Pieces([b"a", b"\xc3", b"<|im_start|>", b"<|other|>"], first_special=2)
    for include, text in ((False, "a"), (True, "a<|im_start|>")):
        detokenizer = Detokenizer(pieces, stop=["<|im_start|>"], include_stop_str_in_output=include)
        assert run(detokenizer, [[0, 3], [2, 0]]) == Outcome(text, "<|im_start|>", 3)
    held = Detokenizer(pieces, stop=["ab", "<|im_start|>"])
    assert run(held, [[0], [1, 2, 0]]) == Outcome("a\ufffd", "<|im_start|>", 3)
    too_early = Detokenizer(pieces, stop=["<|im_start|>"], min_tokens=2)
    assert run(too_early, [[2, 0, 0, 2, 0]]) == Outcome("aa", "<|im_start|>", 4)
    shown = Detokenizer(pieces, skip_special_tokens=False, stop=["<|im_start|>"])
    assert run(shown, [[0, 2, 0]]) == Outcome("a", "<|im_start|>", 2)
