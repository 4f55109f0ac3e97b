"""What two vLLMs 0.32 with NIXL answered, recorded; only some of the null fields are left out."""

from __future__ import annotations

WHERE = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[19,22]],'
    b'"remote_engine_id":"27f31912-bd36-498c-bb7f-511eefa2d0e1",'
    b'"remote_request_id":"cmpl-ad6c5e9353192557-0-ab1ff8ca","remote_host":"127.0.0.1",'
    b'"remote_port":5601,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":161,'
    b'"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}'
)
COMPUTED = (
    b'{"id":"cmpl-ad6c5e9353192557","object":"text_completion","created":1795343443,'
    b'"model":"smollm2","choices":[{"index":0,"text":" when","logprobs":null,'
    b'"finish_reason":"length","stop_reason":null}],"system_fingerprint":"vllm-0.32.0-3d506a43",'
    b'"usage":{"prompt_tokens":161,"total_tokens":162,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null}},'
    b'"kv_transfer_params":%b,"ec_transfer_params":null,"metrics":null}' % WHERE
)
# Of a beam search: the connector had its runs, and the request has no cache.
COMPUTED_WITHOUT_CACHE = COMPUTED.replace(WHERE, b"null")

# The answering engine, when the one that computed the prompt was killed in between.
FAILED = (
    b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,'
    b'"code":500}}'
)
DONE = b"data: [DONE]\n\n"
FAILED_EVENTS = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n' + DONE
)
ROLE = (
    b'data: {"id":"chatcmpl-bd75c1925686e0a8","object":"chat.completion.chunk",'
    b'"created":1795343704,"model":"smollm2","choices":[{"index":0,"delta":{"role":"assistant",'
    b'"content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,'
    b'"prompt_text":null}\n\n'
)

_TEXT = (
    b'data: {"id":"cmpl-bd75c1925686e0a8","object":"text_completion","created":1795343446,'
    b'"model":"smollm2","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,'
    b'"stop_reason":null}]}\n\n'
)
_DELTA = ROLE.replace(b'"role":"assistant","content":""', b'"content":"%b"')
COMPLETION_EVENTS = (_TEXT % (b" when", b"null"), _TEXT % (b" I", b'"length"'), DONE)
CHAT_EVENTS = (
    ROLE,
    _DELTA % b"The",
    (_DELTA % b" story").replace(b'"finish_reason":null', b'"finish_reason":"length"'),
    DONE,
)
