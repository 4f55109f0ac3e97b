"""The names of all metrics an engine emits; router, dashboards and alerts read them here."""

PREFIX = "octavo_"
VLLM_PREFIX = "vllm:"

# gauges
NUM_REQUESTS_RUNNING = "octavo_num_requests_running"
NUM_REQUESTS_WAITING = "octavo_num_requests_waiting"
NUM_QUEUED_TOKENS = "octavo_num_queued_tokens"
KV_CACHE_USAGE_PERC = "octavo_kv_cache_usage_perc"  # a share from 0 to 1, as vLLM's
CACHE_CONFIG_INFO = "octavo_cache_config_info"
ENGINE_STATE = "octavo_engine_state"
STEP_SECONDS = "octavo_step_seconds"
LAST_STEP_AGE_SECONDS = "octavo_last_step_age_seconds"
MODEL_LOAD_SECONDS = "octavo_model_load_seconds"
NUM_HTTP_REQUESTS_IN_FLIGHT = "octavo_num_http_requests_in_flight"

# counters: the text format adds _total
STEPS = "octavo_steps"
PROMPT_TOKENS = "octavo_prompt_tokens"
GENERATION_TOKENS = "octavo_generation_tokens"
PREFIX_CACHE_QUERIES = "octavo_prefix_cache_queries"
PREFIX_CACHE_HITS = "octavo_prefix_cache_hits"
NUM_PREEMPTIONS = "octavo_num_preemptions"
CORRUPTED_REQUESTS = "octavo_corrupted_requests"
REQUEST_SUCCESS = "octavo_request_success"
HTTP_REQUESTS = "octavo_http_requests"

# histograms
TIME_TO_FIRST_TOKEN_SECONDS = "octavo_time_to_first_token_seconds"
INTER_TOKEN_LATENCY_SECONDS = "octavo_inter_token_latency_seconds"
REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS = "octavo_request_time_per_output_token_seconds"
E2E_REQUEST_LATENCY_SECONDS = "octavo_e2e_request_latency_seconds"
REQUEST_QUEUE_TIME_SECONDS = "octavo_request_queue_time_seconds"
REQUEST_PROMPT_TOKENS = "octavo_request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "octavo_request_generation_tokens"
REQUEST_PARAMS_N = "octavo_request_params_n"
REQUEST_PARAMS_MAX_TOKENS = "octavo_request_params_max_tokens"


def vllm_name(name: str) -> str:
    """The same metric under vLLM's name, for dashboards and endpoint pickers that read those."""
    return VLLM_PREFIX + name.removeprefix(PREFIX)
