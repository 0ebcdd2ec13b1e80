"""/metrics, by scraping."""

import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
COUNTERS = [
    "vllm:num_requests_total",
    "vllm:num_requests_succeeded",
    "vllm:num_requests_failed",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:input_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:generated_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
]
GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage",
    "vllm:num_available_blocks",
    "vllm:num_requests_waiting_by_reason[capacity]",
    "vllm:num_requests_waiting_by_reason[deferred]",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_latency_seconds",
    "vllm:prefill_latency_seconds",
    "vllm:decode_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:iteration_tokens_total",
]
OWN_COUNTERS = [
    "octavo:preemptions_total[recompute]",
    "octavo:prefix_cache_hits_total[pool]",
    "octavo:evicted_blocks_total[pool]",
    "octavo:output_length_tokens_total[predicted]",
    "octavo:output_length_tokens_total[actual]",
    "octavo:output_length_tokens_total[error]",
    "octavo:requests_refused_total[queued_reqs]",
    "octavo:requests_refused_total[queued_tokens]",
]


def scrape(http: httpx.Client) -> dict[str, float]:
    """Values by name, the label of `vllm:request_success_total` and the like appended in brackets."""
    values = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "scripted"
            reason = "".join(value for label, value in sample.labels.items() if label not in ("model_name", "le"))
            if "le" not in sample.labels:
                values[sample.name + (f"[{reason}]" if reason else "")] = sample.value
    return values


def scrape_idle(http: httpx.Client) -> dict[str, float]:
    """Once nothing runs: an abort reaches the engine after the client has gone."""
    deadline = time.monotonic() + 5
    while True:
        values = scrape(http)
        if not values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]:
            return values
        assert time.monotonic() < deadline


def test_every_name_is_there(http: httpx.Client) -> None:
    values = scrape(http)
    assert not {*COUNTERS, *GAUGES, *OWN_COUNTERS, *(f"{name}_count" for name in HISTOGRAMS)} - values.keys()


def test_known_traffic_gives_known_values(http: httpx.Client) -> None:
    before = scrape_idle(http)
    prompt = "<say>" + "known " * 4  # 25 tokens, one full block
    for max_tokens in (4, 100):
        assert http.post(TEXT, json={"prompt": prompt, "max_tokens": max_tokens}).status_code == 200
    assert http.post(TEXT, json={"prompt": "<nan><say>abcdef"}).status_code == 500
    assert http.post(TEXT, json={"prompt": "<slow><say>stop here", "stop": "p"}).status_code == 200
    after = scrape_idle(http)
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["vllm:num_requests_total"] == 4
    assert change["vllm:request_success_total[length]"] == 1
    assert change["vllm:request_success_total[stop]"] == 2
    assert change["vllm:request_success_total[error]"] == change["vllm:num_requests_failed"] == 1
    assert change["vllm:num_requests_succeeded"] == 3
    num_prompt_tokens = 25 + 25 + 8 + 11
    assert change["vllm:prompt_tokens_total"] == change["vllm:input_tokens_total"] == num_prompt_tokens
    num_tokens = 4 + 25 + 2 + 4  # and perhaps one that was on its way when the stop string was seen
    assert num_tokens <= change["vllm:generation_tokens_total"] <= num_tokens + 1
    assert change["vllm:generation_tokens_total"] == change["vllm:generated_tokens_total"]
    assert change["vllm:prefix_cache_queries_total"] == num_prompt_tokens
    assert change["vllm:prefix_cache_hits_total"] == 16
    assert change["octavo:prefix_cache_hits_total[pool]"] == 16
    assert change["octavo:output_length_tokens_total[actual]"] == 4 + 25 + 4
    assert change["vllm:request_queue_time_seconds_count"] == 4
    assert change["vllm:request_queue_time_seconds_sum"] < 1
    assert change["vllm:time_to_first_token_seconds_count"] == 4
    assert change["vllm:e2e_request_latency_seconds_count"] == change["vllm:request_latency_seconds_count"] == 3
    assert change["vllm:prefill_latency_seconds_count"] == change["vllm:decode_latency_seconds_count"] == 3
    assert change["vllm:inter_token_latency_seconds_count"] >= 3 + 24 + 1 + 3
    assert change["http_requests_total[/v1/completionsPOST2xx]"] == 3
    assert change["http_requests_total[/v1/completionsPOST5xx]"] == 1
    assert change["vllm:iteration_tokens_total_count"] >= 4 + 25 + 2 + 4
    num_computed = num_prompt_tokens - 16 + 3 + 24 + 1 + 3  # the last token of each is not computed
    assert num_computed <= change["vllm:iteration_tokens_total_sum"] <= num_computed + 8
    assert after["vllm:num_available_blocks"] == 512
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_received_is_waiting_running_and_finished_at_any_moment(http: httpx.Client) -> None:
    with http.stream("POST", TEXT, json={"prompt": "<slow>x", "max_tokens": 50, "n": 20, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        values = scrape(http)
        assert values["vllm:num_requests_running"] == 16
        assert values["vllm:num_requests_waiting"] == 4
        assert values["vllm:num_requests_waiting_by_reason[capacity]"] == 4
        assert values["vllm:kv_cache_usage_perc"] > 0
        for _ in lines:
            values = scrape(http)
            finished = sum(value for name, value in values.items() if name.startswith("vllm:request_success_total["))
            unfinished = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
            assert values["vllm:num_requests_total"] == unfinished + finished
            if not values["vllm:num_requests_waiting"]:
                break
