"""How much one request may ask for. Generous, finite, and each a setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Checked before anything is allocated for a request."""

    max_body_bytes: int = 8 * 2**20  # enforced while the body arrives
    max_header_bytes: int = 64 * 2**10  # request line and headers together
    max_headers: int = 256
    max_url_bytes: int = 16 * 2**10
    max_json_depth: int = 64
    max_json_objects: int = 50_000  # objects and lists in a body
    max_json_values: int = 2**20  # in a body; a prompt's token ids are values
    strict_fields: bool = False  # refuse a body with fields that its endpoint does not know
    max_bad_words: int = 1024
    max_bad_word_chars: int = 256  # each
    max_n: int = 128  # answers to one prompt
    max_prompts: int = 1024  # prompts in one completion request
    max_sequences: int = 2048  # prompts times n
    max_messages: int = 4096
    max_images: int = 16  # pictures in one request
    max_pooling_items: int = 2048  # texts to embed, score or classify in one request
    max_pooling_tokens: int = 2**20  # of all of them
    max_embed_len: int = 0  # tokens of a text to embed; beyond what the model reads in pieces
    max_pooled_numbers: int = 2**23  # in an answer that has some for every token
    max_salt_chars: int = 1024  # cache_salt
    max_stop: int = 64  # stop strings
    max_stop_chars: int = 1024  # each
    max_logprobs: int = 20  # alternatives per token; -1: the whole vocabulary
    max_logit_bias: int = 4096
    max_token_list: int = 65536  # stop_token_ids, allowed_token_ids
    max_concurrent_requests: int = 4096  # HTTP generation requests in flight; more get 503
    max_stored_responses: int = 1000  # of /v1/responses; the oldest go first
    max_stored_response_bytes: int = 64 * 2**20  # of all of them
    response_ttl_s: float = 3600.0  # how long one is kept
    max_file_bytes: int = 200 * 2**20  # of one upload to /v1/files
    max_stored_file_bytes: int = 10 * 2**30  # of all files; more uploads are refused
    max_stored_batches: int = 1000  # of /v1/batches; the oldest that are over go first
    max_batch_requests: int = 50_000  # in one batch
    header_timeout_s: float = 30.0  # a client that sends its headers slower is disconnected
    body_timeout_s: float = 60.0  # a client that sends its body slower gets 408
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is disconnected
