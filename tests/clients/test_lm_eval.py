"""lm-eval with `local-completions`, on a task made of the project's own documents: needs echo with logprobs."""

import json
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.clients.conftest import MODEL, run
from tests.server.running import ROOT, RunningServer
from tests.smollm2 import gguf_path

pytestmark = pytest.mark.clients
TASK = """
task: documents
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def _paragraphs() -> list[str]:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    return [paragraph for paragraph in text.split("\n\n") if 200 < len(paragraph) < 1500][:8]


def test_bits_per_byte_are_those_of_the_offline_engine(
    server: RunningServer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    paragraphs = _paragraphs()
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    (tmp_path / "documents.yaml").write_text(TASK.format(data=data))
    model = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={tokenizer_folder},max_length=2048"
    where = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    run("lm", "lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", "documents", *where)
    (report,) = (tmp_path / "out").rglob("results_*.json")
    measured = json.loads(report.read_text())["results"]["documents"]["bits_per_byte,none"]

    llm = LLM(gguf_path(), max_model_len=2048, use_tqdm=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    bos = llm.tokenizer.bos_token_id  # which lm-eval puts first
    assert bos is not None
    bits = 0.0
    for paragraph in paragraphs:
        prompt = [bos, *llm.tokenizer.encode(paragraph, add_special_tokens=False)]
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        bits -= sum(entry.logprob for entry in output.prompt_logprobs if entry is not None)
    num_bytes = sum(len(paragraph.encode()) for paragraph in paragraphs)
    assert measured == pytest.approx(bits / num_bytes / 0.6931471805599453, rel=2e-3)
