"""Options: from the dataclasses to values, and what happens to the unknown and the retired."""

from dataclasses import fields
from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.arguments import Parser, count, dashed, parse
from octavo.cli.main import build_parser, main
from octavo.cli.retired import RETIRED
from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.server.options import ServerConfig
from tests.cli.conftest import Fails

SERVE_OPTIONS = """
    --access-log --activation-dtype --admission-policy
    --allowed-origins --api-key --async-scheduling --attention-backend --block-size
    --chat-template --client-timeout --download-dir --dtype --enable-prefix-caching
    --enforce-eager --generation-config --gpu-memory-utilization --host --kv-cache-dir --kv-cache-dtype
    --kv-cache-memory-bytes --kv-eviction-policy --max-body-bytes --max-model-len
    --max-num-batched-tokens --max-num-queued-reqs --max-num-seqs --max-request-choices
    --model --num-swap-blocks --num-threads --override-generation-config --port --preemption-mode --quantization
    --reasoning-parser --request-timeout --revision --runner --scheduling-policy --seed --served-model-name
    --shutdown-timeout --sse-ping-interval --ssl-ca-certs --ssl-certfile --ssl-keyfile --strict --swap-space
    --timeout-keep-alive --tokenizer --tool-call-parser --trust-request-chat-template
""".split()  # noqa: SIM905 - a new option is a decision, made here


def serve_configs(*options: str) -> tuple[EngineConfig, ServerConfig]:
    argv = ["serve", *map(dashed, options)]
    return serve.configs(parse(build_parser(argv), argv))


def test_the_option_list_is_frozen() -> None:
    parser = Parser()
    serve.configure(parser)
    names = {name for name in parser.option_names() if not name.startswith("--no-")} - {"--help"}
    assert sorted(names) == SERVE_OPTIONS
    assert len(SERVE_OPTIONS) <= 52  # fifty, and two for what stands between a server and its clients


def test_every_config_field_is_an_option_with_help() -> None:
    for item in (*fields(EngineConfig), *fields(ServerConfig)):
        assert "--" + item.name.replace("_", "-") in SERVE_OPTIONS
        assert item.metadata["help"].endswith(".")


def test_without_options_the_defaults_are_the_dataclasses() -> None:
    assert serve_configs("m") == (EngineConfig(model="m"), ServerConfig())


@pytest.mark.parametrize("options", [("m",), ("--model", "m"), ("--model=m",), ("m", "--model", "m")])
def test_the_model_is_an_argument_or_an_option(options: tuple[str, ...]) -> None:
    assert serve_configs(*options)[0].model == "m"


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="Two models"):
        serve_configs("m", "--model", "other")


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        serve_configs()


def test_options_reach_their_fields() -> None:
    engine, server = serve_configs(
        "m", "--dtype", "half", "--max_model_len=8k", "--max-num-batched-tokens", "1.5k", "--block-size", "32",
        "--kv-cache-memory-bytes", "2G", "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching",
        "--enforce-eager", "--port", "9", "--host", "0.0.0.0", "--shutdown-timeout", "1.5",
    )  # fmt: skip
    assert engine == EngineConfig(
        model="m",
        dtype="half",
        max_model_len=8000,
        max_num_batched_tokens=1500,
        block_size=32,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    assert server == ServerConfig(port=9, host="0.0.0.0", shutdown_timeout=1.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-1", -1), ("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("1.005k", 1005),
        ("4611686018427387905", 2**62 + 1),
        ("512M", 512 << 20),
        ("2m", 2_000_000), ("2G", 2 << 30), ("2GiB", 2 << 30), ("2GB", 2 << 30), ("1T", 1 << 40),
    ],
)  # fmt: skip
def test_counts_understand_suffixes(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "x", "1kk", "1.0001k", "1e3", "nan", "infk", "B", "5B", "0.3K"])
def test_counts_refuse_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        count(text)


def test_a_bad_number_is_one_line_with_the_option_and_the_value(fails: Fails) -> None:
    assert fails("serve", "m", "--max-model-len", "many") == (
        "octavo serve: error: argument --max-model-len: invalid number value: 'many'\n"
    )


def test_a_value_out_of_range_is_one_line_and_status_2(fails: Fails) -> None:
    assert fails("serve", "m", "--block-size", "24") == (
        "octavo: error: --block-size must be a positive multiple of 16, got 24.\n"
    )


@pytest.mark.parametrize(
    ("typed", "closest"),
    [
        ("--max-model-length", "--max-model-len"),
        ("--max-num-batch-tokens=5", "--max-num-batched-tokens"),
        ("--max_model", "--max-model-len"),
    ],
)
def test_an_unknown_option_names_the_closest(fails: Fails, typed: str, closest: str) -> None:
    error = fails("serve", "m", typed)
    assert error == f"octavo serve: error: unknown option {dashed(typed).split('=')[0]}. Did you mean {closest}?\n"


def test_an_unknown_option_like_no_other_points_to_the_help(fails: Fails) -> None:
    assert "See octavo bench latency --help." in fails("bench", "latency", "--zzzzzzzz")


def test_a_surplus_argument_is_named(fails: Fails) -> None:
    assert "unexpected argument 'n'" in fails("serve", "m", "n")


def test_an_unknown_command_is_refused(fails: Fails) -> None:
    assert "invalid choice: 'sreve'" in fails("sreve", "m")


def test_no_command_is_refused(fails: Fails) -> None:
    assert "COMMAND" in fails()


ARTICLE_OPTIONS = [
    "--metrics-backend=prometheus", "--disable-preemption",
    "--enforce-ranked-decoder", "--trust-remote-code", "--task=auto", "--tensor-parallel-size=1",
    "--pipeline-parallel-size=1", "--use-v2-block-manager", "--disable-log-requests", "--worker-use-ray",
    "--device=cpu", "--load-format=auto",
]  # fmt: skip


def test_options_without_effect_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = serve_configs("m", *ARTICLE_OPTIONS)
    assert engine == EngineConfig(model="m")
    lines = capsys.readouterr().err.splitlines()
    assert (
        "octavo serve: --enforce-ranked-decoder: this option never existed, in vLLM either; it has no effect." in lines
    )
    assert not any("--tensor-parallel-size" in line for line in lines)  # it is what happens anyway


@pytest.mark.parametrize(
    "options",
    [
        ("-q", "fp8"), ("--tensor-parallel-size", "2"), ("-tp", "2"),
        ("--speculative-model", "x"), ("--speculative-config", '{"model": "x"}'), ("--task", "score"),
        ("--enable-lora",), ("--load-format", "dummy"), ("--lora-modules", "a=b", "c=d"),
    ],
)  # fmt: skip
def test_options_that_users_rely_on_are_refused(fails: Fails, options: tuple[str, ...]) -> None:
    error = fails("serve", "m", *options)
    assert error.startswith(f"octavo serve: error: {' '.join(options)}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("options", [("--task", "embed"), ("--convert=embed",), ("--runner", "pooling")])
def test_embedding_is_asked_for_by_any_of_vllms_options(options: tuple[str, ...]) -> None:
    assert serve_configs("m", *options)[0].runner == "pooling"


def test_switching_a_refused_flag_off_is_fine() -> None:
    assert serve_configs("m", "--no-enable-lora")[0] == EngineConfig(model="m")


def test_retired_options_are_named_once_and_explained() -> None:
    names = [name for row in RETIRED for name in row.names.split()]
    assert len(names) == len(set(names))
    assert not set(names) & set(SERVE_OPTIONS)
    assert all(row.note.endswith(".") for row in RETIRED)


def test_a_model_that_is_not_there_is_one_line_and_status_1(fails: Fails, tmp_path: Path) -> None:
    error = fails("bench", "latency", "--model", str(tmp_path / "no.gguf"), status=1)
    assert error.startswith("octavo: error: ")
    assert "no.gguf" in error
    assert error.count("\n") == 1


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", interrupted)
    assert main(["serve", "m"]) == 130


@pytest.mark.parametrize("options", [("--api-key", "a", "b"), ("--api-key", '["a", "b"]'), ('--api-key=["a", "b"]',)])
def test_a_list_is_words_or_as_in_vllm_json(options: tuple[str, ...]) -> None:
    assert serve_configs("m", *options)[1].api_key == ("a", "b")


def test_a_list_that_is_no_list_of_strings_is_refused(fails: Fails) -> None:
    assert "invalid list value: '[1]'" in fails("serve", "m", "--allowed-origins", "[1]")


def test_https_without_a_certificate_is_refused(fails: Fails) -> None:
    assert "needs --ssl-certfile" in fails("serve", "m", "--ssl-keyfile", "key.pem")


def test_a_model_may_have_several_names() -> None:
    assert serve_configs("m", "--served-model-name", "a", "b")[1].served_model_name == ("a", "b")
    with pytest.raises(ConfigError, match="empty name"):
        serve_configs("m", "--served-model-name", "")


@pytest.mark.parametrize(
    ("typed", "host"), [("[::1]", "::1"), ("::", "::"), ("localhost", "localhost"), ("[::]", "::")]
)
def test_an_address_may_be_in_brackets(typed: str, host: str) -> None:
    assert serve_configs("m", "--host", typed)[1].host == host


def test_an_option_of_vllms_that_is_not_listed_is_refused_with_the_closest(fails: Fails) -> None:
    assert "unknown option --max-num-partial-prefills. Did you mean --" in fails(
        "serve", "m", "--max-num-partial-prefills=2"
    )
