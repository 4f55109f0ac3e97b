"""Every counter and histogram against what clients were told, over the real engine's steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo_engine.server.settings import ServerSettings
from tests.fakes.simulated import simulating

PROMPT = "It was a dark and stormy night; the rain fell in torrents, except at intervals."


def read(client: httpx.Client) -> dict[str, float]:
    """Samples by name and their own labels."""
    samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            samples["|".join([sample.name, *own.values()])] = sample.value
    return samples


def test_special_tokens_of_a_chat_are_counted_though_its_text_hides_them():
    body = {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "ignore_eos": True,
        "return_token_ids": True, "logit_bias": {"257": 5}, "temperature": 1.0, "seed": 1,
    }  # fmt: skip
    with simulating() as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/v1/chat/completions", json=body, timeout=30).json()
        server.check_idle()
        reported = read(client)

    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"] == 200
    assert (
        reported["octavo_generation_tokens_total"]
        == reported["vllm:generation_tokens_total"]
        == 200
    )


def test_what_is_exposed_is_what_clients_were_told():
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT + str(number % 3), "max_tokens": 3 + number, "n": 1 + number % 2,
         "ignore_eos": True, "stream": number % 3 == 0}
        for number in range(12)
    ]  # fmt: skip
    bodies[5] |= {"prompt": [PROMPT, "and then"], "n": 2}
    with simulating(settings=ServerSettings(vllm_metrics=True)) as server:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            usage = {"stream_options": {"include_usage": True}} if body["stream"] else {}
            answer = httpx.post(server.url + "/v1/completions", json=body | usage, timeout=30)
            if not body["stream"]:
                return dict(answer.json()["usage"])
            return dict(
                httpx.Response(200, content=answer.text.split("data: ")[-2]).json()["usage"]
            )

        with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=server.url) as client:
            usages = [*map(ask, bodies[:4]), *pool.map(ask, bodies[4:])]
            server.check_idle()
            reported = read(client)

    def prompts(body: dict[str, Any]) -> list[str]:
        return body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]

    num_prompts = sum(len(prompts(body)) for body in bodies)
    sequences = [body["max_tokens"] for body in bodies for _ in prompts(body) * body["n"]]
    generated = sum(sequences)
    prompt_sequences = sum(
        usage["prompt_tokens"] * body["n"] for usage, body in zip(usages, bodies, strict=True)
    )
    assert sum(usage["completion_tokens"] for usage in usages) == generated
    assert reported["octavo_generation_tokens_total"] == generated
    assert reported["octavo_request_generation_tokens_sum"] == generated
    assert reported["octavo_request_generation_tokens_count"] == len(sequences)
    assert reported["octavo_request_success_total|length"] == len(sequences)
    assert reported["octavo_prompt_tokens_total"] == prompt_sequences
    cached = reported["octavo_prompt_tokens_cached_total"]
    assert 0 < cached < prompt_sequences
    assert reported["octavo_prompt_tokens_by_source_total|local_cache_hit"] == cached
    assert (
        reported["octavo_prompt_tokens_by_source_total|local_compute"] == prompt_sequences - cached
    )
    assert reported["octavo_prefix_cache_hits_total"] == cached
    # All that was computed: what was not cached, and each token but the last of its sequence.
    computed = prompt_sequences - cached + generated - len(sequences)
    assert reported["octavo_iteration_tokens_total_sum"] == computed
    assert reported["octavo_iteration_tokens_total_count"] == reported["octavo_steps_total"]

    assert reported["octavo_request_prompt_tokens_sum"] == sum(u["prompt_tokens"] for u in usages)
    one_each = (
        "request_prompt_tokens", "time_to_first_token_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_prefill_kv_computed_tokens",
    )  # fmt: skip
    for name in one_each:
        assert reported[f"octavo_{name}_count"] == num_prompts, name
    for name in ("request_decode_time", "request_inference_time", "e2e_request_latency",
                 "request_time_per_output_token"):  # fmt: skip
        assert reported[f"octavo_{name}_seconds_count"] == len(sequences), name
    longest = sum(body["max_tokens"] for body in bodies)
    assert reported["octavo_request_max_num_generation_tokens_sum"] == longest
    assert reported["octavo_request_params_n_count"] == len(bodies)
    # Phases make up the whole.
    inference = reported["octavo_request_inference_time_seconds_sum"]
    assert reported["octavo_request_decode_time_seconds_sum"] <= inference
    assert inference <= reported["octavo_e2e_request_latency_seconds_sum"]

    assert reported["octavo_num_requests_running"] == reported["octavo_num_requests_waiting"] == 0
    assert reported["octavo_num_requests_waiting_by_reason|capacity"] == 0
    assert reported["octavo_engine_sleep_state|awake"] == 1
    assert reported["vllm:lora_requests_info|0||"] == 0
    assert reported["vllm:gpu_cache_usage_perc"] == reported["vllm:kv_cache_usage_perc"] == 0
    for name, value in list(reported.items()):
        if name.startswith("octavo_"):
            assert reported[name.replace("octavo_", "vllm:", 1)] == value


def test_an_answer_sent_whole_is_timed_like_one_that_is_streamed():
    """Its first token is not its last one, though both leave at once."""
    from tests.fakes.simulated import CONFIG

    sim = type(CONFIG.sim)(kv_blocks=256, step_base_ms=4.0)
    with simulating(CONFIG.replace(sim=sim)) as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20, "ignore_eos": True})
        reported = read(client)
    first = reported["octavo_time_to_first_token_seconds_sum"]
    whole = reported["octavo_e2e_request_latency_seconds_sum"]
    assert reported["octavo_request_decode_time_seconds_sum"] >= 19 * 0.004
    assert first + 19 * 0.004 <= whole
    per_token = reported["octavo_request_time_per_output_token_seconds_sum"]
    assert 0.004 <= per_token <= (whole - first) / 18
