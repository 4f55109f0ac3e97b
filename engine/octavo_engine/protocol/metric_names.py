"""The names of all metrics engines and routers emit; dashboards and alerts read them here."""

PREFIX = "octavo_"
VLLM_PREFIX = "vllm:"

# gauges
NUM_REQUESTS_RUNNING = "octavo_num_requests_running"
NUM_REQUESTS_WAITING = "octavo_num_requests_waiting"
NUM_QUEUED_TOKENS = "octavo_num_queued_tokens"
KV_CACHE_USAGE_PERC = "octavo_kv_cache_usage_perc"  # a share from 0 to 1, as vLLM's
CACHE_CONFIG_INFO = "octavo_cache_config_info"
NUM_REQUESTS_WAITING_BY_REASON = "octavo_num_requests_waiting_by_reason"
ENGINE_SLEEP_STATE = "octavo_engine_sleep_state"
LORA_REQUESTS_INFO = "octavo_lora_requests_info"
LORA_ADAPTERS_HELD = "octavo_lora_adapters_held"
ENGINE_STATE = "octavo_engine_state"
STEP_SECONDS = "octavo_step_seconds"
LAST_STEP_AGE_SECONDS = "octavo_last_step_age_seconds"
MODEL_LOAD_SECONDS = "octavo_model_load_seconds"
KV_RETAINED_BLOCKS = "octavo_kv_retained_blocks"
KV_TIER_BLOCKS = "octavo_kv_tier_blocks"
NUM_HTTP_REQUESTS_IN_FLIGHT = "octavo_num_http_requests_in_flight"
MM_PREPROCESS_PENDING = "octavo_mm_preprocess_pending"

# counters: the text format adds _total
CPU_SECONDS = "octavo_cpu_seconds"
STEPS = "octavo_steps"
PROMPT_TOKENS = "octavo_prompt_tokens"
GENERATION_TOKENS = "octavo_generation_tokens"
PREFIX_CACHE_QUERIES = "octavo_prefix_cache_queries"
PREFIX_CACHE_HITS = "octavo_prefix_cache_hits"
PROMPT_TOKENS_CACHED = "octavo_prompt_tokens_cached"
PROMPT_TOKENS_BY_SOURCE = "octavo_prompt_tokens_by_source"
NUM_PREEMPTIONS = "octavo_num_preemptions"
CORRUPTED_REQUESTS = "octavo_corrupted_requests"
REQUEST_SUCCESS = "octavo_request_success"
HTTP_REQUESTS = "octavo_http_requests"
GRAMMAR_CACHE_HITS = "octavo_grammar_cache_hits"
GRAMMAR_FAILURES = "octavo_grammar_failures"
LORA_LOAD_FAILURES = "octavo_lora_load_failures"
SPEC_DECODE_NUM_DRAFTS = "octavo_spec_decode_num_drafts"
SPEC_DECODE_NUM_DRAFT_TOKENS = "octavo_spec_decode_num_draft_tokens"
SPEC_DECODE_NUM_ACCEPTED_TOKENS = "octavo_spec_decode_num_accepted_tokens"
SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS = "octavo_spec_decode_num_accepted_tokens_per_pos"
EXPERT_RANK_TOKENS = "octavo_expert_rank_tokens"
EXPERT_TOKENS = "octavo_expert_tokens"
KV_OFFLOAD_BYTES = "octavo_kv_offload_total_bytes"
KV_OFFLOAD_TIME = "octavo_kv_offload_total_time"
KV_RETENTION_REFUSED_BLOCKS = "octavo_kv_retention_refused_blocks"
KV_RETENTION_GIVEN_UP_BLOCKS = "octavo_kv_retention_given_up_blocks"
KV_TIER_HIT_BLOCKS = "octavo_kv_tier_hit_blocks"
KV_TIER_FAILURES = "octavo_kv_tier_failures"
MM_CACHE_QUERIES = "octavo_mm_cache_queries"
MM_CACHE_HITS = "octavo_mm_cache_hits"
MM_ENCODE_SECONDS = "octavo_mm_encode_seconds"
MM_PREPROCESS_SECONDS = "octavo_mm_preprocess_seconds"
CLOCK_JUMPS = "octavo_clock_jumps"

# histograms
TIME_TO_FIRST_TOKEN_SECONDS = "octavo_time_to_first_token_seconds"
INTER_TOKEN_LATENCY_SECONDS = "octavo_inter_token_latency_seconds"
REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS = "octavo_request_time_per_output_token_seconds"
E2E_REQUEST_LATENCY_SECONDS = "octavo_e2e_request_latency_seconds"
REQUEST_QUEUE_TIME_SECONDS = "octavo_request_queue_time_seconds"
REQUEST_PREFILL_TIME_SECONDS = "octavo_request_prefill_time_seconds"
REQUEST_DECODE_TIME_SECONDS = "octavo_request_decode_time_seconds"
REQUEST_INFERENCE_TIME_SECONDS = "octavo_request_inference_time_seconds"
REQUEST_PREFILL_COMPUTED_TOKENS = "octavo_request_prefill_kv_computed_tokens"
REQUEST_MAX_GENERATION_TOKENS = "octavo_request_max_num_generation_tokens"
ITERATION_TOKENS = "octavo_iteration_tokens_total"  # a histogram, named so by vLLM
REQUEST_PROMPT_TOKENS = "octavo_request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "octavo_request_generation_tokens"
REQUEST_PARAMS_N = "octavo_request_params_n"
REQUEST_PARAMS_MAX_TOKENS = "octavo_request_params_max_tokens"
GRAMMAR_COMPILE_SECONDS = "octavo_grammar_compile_seconds"
LORA_LOAD_SECONDS = "octavo_lora_load_seconds"

# -- ROUTER: what a router emits -------------------------------------------------------------------

ROUTER_PREFIX = "octavo_router_"

# requests, as clients see them
ROUTER_REQUESTS = "octavo_router_requests"  # counter {model, route, code, stream, outcome}
ROUTER_REQUEST_DURATION_SECONDS = "octavo_router_request_duration_seconds"
ROUTER_TIME_TO_FIRST_TOKEN_SECONDS = "octavo_router_time_to_first_token_seconds"
ROUTER_INTER_TOKEN_LATENCY_SECONDS = "octavo_router_inter_token_latency_seconds"
ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS = "octavo_router_time_per_output_token_seconds"
ROUTER_REQUEST_SIZE_BYTES = "octavo_router_request_size_bytes"
ROUTER_RESPONSE_SIZE_BYTES = "octavo_router_response_size_bytes"
ROUTER_REQUESTS_RUNNING = "octavo_router_requests_running"
ROUTER_TOKENS = "octavo_router_tokens"  # counter {model, kind: prompt | cached | output}
ROUTER_CLIENT_DISCONNECTS = "octavo_router_client_disconnects"

# tenants
ROUTER_TENANT_REQUESTS = "octavo_router_tenant_requests"
ROUTER_TENANT_TOKENS = "octavo_router_tenant_tokens"  # counter {tenant, kind}
ROUTER_TENANT_REJECTIONS = "octavo_router_tenant_rejections"
ROUTER_TENANT_QUEUE_SECONDS = "octavo_router_tenant_queue_seconds"  # counter: a sum

# decisions
ROUTER_PICKS = "octavo_router_picks"  # counter {pool, endpoint, policy}
ROUTER_PICK_DURATION_SECONDS = "octavo_router_pick_duration_seconds"
ROUTER_PREFIX_QUERIED_TOKENS = "octavo_router_prefix_queried_tokens"
ROUTER_PREFIX_PREDICTED_TOKENS = "octavo_router_prefix_predicted_tokens"
ROUTER_PREFIX_CACHED_TOKENS = "octavo_router_prefix_cached_tokens"  # as engines reported
ROUTER_PREFIX_PREDICTION_ERROR_TOKENS = "octavo_router_prefix_prediction_error_tokens"
ROUTER_SHADOW_PICKS = "octavo_router_shadow_picks"  # counter {policy, shadow, verdict}
ROUTER_SHADOW_REGRET_SECONDS = "octavo_router_shadow_regret_seconds"  # gauge: it may shrink
ROUTER_SHADOW_MATCHED_TOKENS = "octavo_router_shadow_matched_tokens"  # counter {.., of}
ROUTER_INDEX_KEYS = "octavo_router_index_keys"
ROUTER_INDEX_MEMORY_BYTES = "octavo_router_index_memory_bytes"

# control
ROUTER_QUEUE_SIZE = "octavo_router_queue_size"
ROUTER_QUEUE_TOKENS = "octavo_router_queue_tokens"
ROUTER_REQUESTS_HELD = "octavo_router_requests_held"
ROUTER_QUEUE_DURATION_SECONDS = "octavo_router_queue_duration_seconds"
ROUTER_REJECTIONS = "octavo_router_rejections"  # counter {pool, reason}

# upstream
ROUTER_UPSTREAM_ATTEMPTS = "octavo_router_upstream_attempts"  # counter {pool, outcome}
ROUTER_UPSTREAM_REQUESTS = "octavo_router_upstream_requests"  # counter {endpoint, outcome}
ROUTER_RETRIES = "octavo_router_retries"
ROUTER_RETRIES_EXHAUSTED = "octavo_router_retries_exhausted"
ROUTER_QUARANTINED_REQUESTS = "octavo_router_quarantined_requests"
ROUTER_HANDED_OVER_PROMPTS = "octavo_router_handed_over_prompts"  # counter {pool, outcome}
ROUTER_SIDE_CHANGES = "octavo_router_side_changes"  # counter {pool, side}
ROUTER_RESUMES = "octavo_router_resumes"  # counter {pool, outcome}
ROUTER_ADAPTER_LOADS = "octavo_router_adapter_loads"
ROUTER_ADAPTER_LOAD_FAILURES = "octavo_router_adapter_load_failures"
ROUTER_ADAPTER_UNLOADS = "octavo_router_adapter_unloads"
ROUTER_EJECTIONS = "octavo_router_ejections"
ROUTER_STATE_CHANGES = "octavo_router_endpoint_state_changes"  # counter {pool, state}
ROUTER_ENDPOINTS = "octavo_router_endpoints"  # gauge {pool, state}
ROUTER_ENDPOINT_IN_FLIGHT = "octavo_router_endpoint_in_flight"
ROUTER_ENDPOINT_PENDING_TOKENS = "octavo_router_endpoint_pending_tokens"
ROUTER_ENDPOINT_RUNNING = "octavo_router_endpoint_running"
ROUTER_ENDPOINT_WAITING = "octavo_router_endpoint_waiting"
ROUTER_ENDPOINT_QUEUED_TOKENS = "octavo_router_endpoint_queued_tokens"
ROUTER_ENDPOINT_KV_USAGE_PERC = "octavo_router_endpoint_kv_usage_perc"  # from 0 to 1
ROUTER_ENDPOINT_SIGNAL_AGE_SECONDS = "octavo_router_endpoint_signal_age_seconds"

# signals and discovery
ROUTER_SIGNAL_FRAMES = "octavo_router_signal_frames"  # counter {kind}
ROUTER_SIGNAL_BYTES = "octavo_router_signal_residency_bytes"  # counter {kind: stored | evicted}
ROUTER_SIGNAL_BREAKS = "octavo_router_signal_breaks"  # counter {reason}
ROUTER_SIGNAL_CONNECTS = "octavo_router_signal_connects"  # counter {outcome}
ROUTER_POLLS = "octavo_router_polls"  # counter {outcome}
ROUTER_KV_EVENTS = "octavo_router_kv_events"  # counter {type, status}
ROUTER_DISCOVERY_UPDATES = "octavo_router_discovery_updates"  # counter {source}
ROUTER_DISCOVERY_ERRORS = "octavo_router_discovery_errors"
ROUTER_DISCOVERY_RELISTS = "octavo_router_discovery_relists"
ROUTER_DISCOVERY_AGE_SECONDS = "octavo_router_discovery_age_seconds"

# this process
ROUTER_INFO = "octavo_router"  # info: the text format adds _info
ROUTER_LOOP_LAG_SECONDS = "octavo_router_event_loop_lag_seconds"
ROUTER_LOOP_STALLS = "octavo_router_event_loop_stalls"
ROUTER_CLOCK_JUMPS = "octavo_router_clock_jumps"
ROUTER_CLIENT_CONNECTIONS = "octavo_router_client_connections"
ROUTER_UPSTREAM_CONNECTIONS = "octavo_router_upstream_connections"
ROUTER_CONFIG_RELOADS = "octavo_router_config_reloads"  # counter {outcome}


def vllm_name(name: str) -> str:
    """The same metric under vLLM's name, for dashboards and endpoint pickers that read those."""
    return VLLM_PREFIX + name.removeprefix(PREFIX)
