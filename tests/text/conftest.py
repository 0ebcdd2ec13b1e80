"""What the text tests share: the real GGUF vocabulary and strings that tokenizers get wrong."""

from pathlib import Path

import pytest

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.gguf_format import GGUFFile
from octavo.checkpoint.gguf_vocabulary import read_vocabulary
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.smollm2 import gguf_path

AWKWARD = [
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "  two leading",
    "don't won't I'LL we'Ve 'S",
    "snake_case camelCase SCREAMING Ünïcödé naïve ﬁ ß İstanbul",
    "😀😃 👍🏽 🇪🇺 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "family 👩‍👩‍👧‍👦 technologist 🧑🏿‍💻 flag 🏳️‍🌈",
    "日本語のテキスト。中文字符,한국어 텍스트",
    "مرحبا بالعالم ١٢٣ עברית שָׁלוֹם",
    "e\u0301 a\u0308 Z\u0351\u036b\u0343\u036a\u0302 \u0301alone",
    "हिन्दी देवनागरी ไทย ภาษา မြန်မာ",
    "1234567890 3.14159 1e-9 0xDEADBEEF 2²³ ½ Ⅷ ४५६ ①②",
    '$100 + 20% = €95; <tag attr="x">&amp;</tag> `code` ~/.bashrc #!',
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # comment\n\n\nclass A:\n    pass\n",
    "for (int i = 0; i < n; ++i) {\r\n    a[i] ^= b[i] | c[i];\r\n}\r\n",
    "a" + " " * 37 + "b" + "\n" * 23 + "c" + "\t" * 11 + "d",
    " \n \n\n  \t \r\n\r \v\f",
    "nul\x00inside\x00\x00 bell\x07 escape\x1b[0m delete\x7f",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\ufeffbom\u2028line\u2029paragraph\u0085nel",
    "\u200d\u200c\u202eright to left\u202c",
    "￿ \ufffd \U0010ffff \ue000",
    "▁ lower ▁▁block▁ <0x0A> Ġ Ċ",
    "</s><s>[INST] <unk> <pad>",
    "<|im_start|>system\nYou<|im_end|>\n<|endoftext|><|im_end|><|im_start|",
    "x" * 10_000,
    "the quick brown fox 🦊 jumps 123 " * 320,
    "".join(chr(0x4E00 + i * 7) for i in range(1000)),
]


@pytest.fixture(scope="session")
def awkward_texts() -> list[str]:
    return AWKWARD


@pytest.fixture(params=AWKWARD, ids=lambda text: ascii(text)[1:25])
def awkward(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return Path(gguf_path())


@pytest.fixture(scope="session")
def smollm_vocabulary(smollm_path: Path) -> Vocabulary:
    vocabulary = read_vocabulary(GGUFFile(smollm_path))
    assert vocabulary is not None
    return vocabulary


@pytest.fixture(scope="session")
def smollm(smollm_path: Path, smollm_vocabulary: Vocabulary) -> Tokenizer:
    return load_tokenizer(smollm_path, smollm_vocabulary)
