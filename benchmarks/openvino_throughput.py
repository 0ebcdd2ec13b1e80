"""OpenVINO GenAI's continuous batching, all requests at once; runs in an environment that has openvino_genai only.

python benchmarks/openvino_throughput.py FILE.gguf REQUESTS INPUT_LEN OUTPUT_LEN SEED
"""

import json
import random
import sys
import time

import openvino as ov
import openvino_genai

VOCAB_SIZE = 10_000


def main() -> None:
    path, num_requests, input_len, output_len, seed = sys.argv[1], *map(int, sys.argv[2:])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU")
    generator = random.Random(seed)

    def generate(count: int, length: int, new_tokens: int) -> int:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        prompts = [ov.Tensor([generator.choices(range(VOCAB_SIZE), k=length)]) for _ in range(count)]
        results = pipeline.generate(prompts, [config] * count)
        return sum(len(result.m_generation_ids[0]) for result in results)

    generate(2, 16, 4)
    start = time.perf_counter()
    num_tokens = generate(num_requests, input_len, output_len)
    seconds = time.perf_counter() - start
    assert num_tokens == num_requests * output_len, num_tokens
    print(json.dumps({"output tok/s": num_tokens / seconds}))


if __name__ == "__main__":
    main()
