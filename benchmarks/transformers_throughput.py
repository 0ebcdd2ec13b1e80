"""transformers' `generate` in bfloat16: one static batch, or two requests one by one, after a short warm-up.

python benchmarks/transformers_throughput.py FOLDER BATCH INPUT_LEN OUTPUT_LEN SEED
"""

import json
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, batch, input_len, output_len, seed = sys.argv[1], *map(int, sys.argv[2:])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(seed)
    num_requests = max(batch, 2)  # one by one, the rate of two is that of all
    prompts = torch.randint(0, model.config.vocab_size, (num_requests, input_len), generator=generator)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(prompts[:batch, :8], max_new_tokens=2, min_new_tokens=2, **options)
        start = time.perf_counter()
        for first in range(0, num_requests, batch):
            rows = prompts[first : first + batch]
            output = model.generate(rows, max_new_tokens=output_len, min_new_tokens=output_len, **options)
            assert output.shape == (len(rows), input_len + output_len)
        seconds = time.perf_counter() - start
    print(json.dumps({"output tok/s": num_requests * output_len / seconds}))


if __name__ == "__main__":
    main()
