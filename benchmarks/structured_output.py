"""What structured output costs: requests ruled by a JSON schema against free ones, by turns, all answers of one length.

    python benchmarks/structured_output.py [--model FILE] [--quantization none]
        [--requests 32] [--output 96] [--rounds 5]

The schema is an array longer than the answers, so that every answer is cut by the limit and both kinds compute the same
number of tokens. The engine runs in this process; grammars are built before the clock starts, by a round that does not
count.
"""

import argparse
import json
import statistics
import time

from server_overhead import default_model

from octavo import LLM, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Prague", "Lima", "Oslo"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 60, "maxItems": 100})


def main() -> None:
    parser = argparse.ArgumentParser(description="Structured output against free output.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--quantization", default="auto", help="the faster the model, the more a mask weighs")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, quantization=args.quantization, use_tqdm=False, enable_prefix_caching=False)
    prompts = [f"List {i + 60} people as JSON:\n" for i in range(args.requests)]
    kinds = {"free": None, "constrained": StructuredOutputs(json=SCHEMA)}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(args.rounds + 1):
        for kind, structure in kinds.items():
            params = SamplingParams(
                temperature=0.7, seed=index, max_tokens=args.output, ignore_eos=True, structured_outputs=structure
            )
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == args.requests * args.output
            if index:
                rates[kind].append(num_tokens / seconds)
                print(f"round {index}: {kind}: {rates[kind][-1]:.1f} output tokens/s", flush=True)
    medians = ", ".join(f"{kind} {statistics.median(values):.1f}" for kind, values in rates.items())
    best = 1 - max(rates["constrained"]) / max(rates["free"])
    pairs = statistics.median(1 - c / f for f, c in zip(rates["free"], rates["constrained"], strict=True))
    print(f"medians: {medians} output tokens/s; less by {pairs:.1%} (median of the pairs), {best:.1%} (best of each)")


if __name__ == "__main__":
    main()
