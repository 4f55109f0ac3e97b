"""The table of routes: what is served where, who may call it, and the shapes of body and answer.

The server, /openapi.json and docs/api.md are all made from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo_common.pages import CHAT_FILES
from octavo_engine.protocol.endpoints import DRAIN_PATH, STREAM_PATH
from octavo_engine.server.admin import adapters, dev, drain, probes
from octavo_engine.server.admin.aborts import Aborted, AbortRequest, abort_requests
from octavo_engine.server.anthropic import batch_shapes as message_batch_shapes
from octavo_engine.server.anthropic import batches as message_batches
from octavo_engine.server.anthropic import bodies as message_bodies
from octavo_engine.server.anthropic import shapes as message_shapes
from octavo_engine.server.anthropic.create import count_tokens, create_message
from octavo_engine.server.compat import not_implemented, render, sagemaker
from octavo_engine.server.compat.generative_scoring import (
    GenerativeScores,
    GenerativeScoringRequest,
    generative_scoring,
)
from octavo_engine.server.compat.token_generate import (
    TokenAnswer,
    TokenChunk,
    TokenRequest,
    token_generate,
)
from octavo_engine.server.docs import endpoints
from octavo_engine.server.http.exchange import Exchange
from octavo_engine.server.openai import models, response_schemas, schemas, tokenize
from octavo_engine.server.openai.audio import endpoint as audio
from octavo_engine.server.openai.audio import shapes as audio_shapes
from octavo_engine.server.openai.audio.form import AudioForm
from octavo_engine.server.openai.batches import batches, files
from octavo_engine.server.openai.batches import shapes as batch_shapes
from octavo_engine.server.openai.chat.batch import ChatBatchRequest, chat_batch
from octavo_engine.server.openai.chat.endpoint import chat_completions
from octavo_engine.server.openai.completions import completions
from octavo_engine.server.openai.responses import bodies as response_bodies
from octavo_engine.server.openai.responses import shapes as response_shapes
from octavo_engine.server.openai.responses import stored as stored_responses
from octavo_engine.server.openai.responses.create import count_input_tokens, create_response
from octavo_engine.server.pooling import bodies, shapes
from octavo_engine.server.pooling.classify import classify
from octavo_engine.server.pooling.cohere_embed import cohere_embed
from octavo_engine.server.pooling.embeddings import embeddings
from octavo_engine.server.pooling.pooling import pooling
from octavo_engine.server.pooling.rerank import rerank, rerank_v2
from octavo_engine.server.pooling.score import score
from octavo_engine.server.routers.stream_route import stream
from octavo_engine.server.service import Service

if TYPE_CHECKING:
    from octavo_engine.server.http.auth import Access
    from octavo_engine.server.settings import ServerSettings

Handler = Callable[[Exchange, Service], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One route. Everything from `says` on describes it and changes nothing."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    access: Access  # key: with an API key; admin: with an admin key if there are any, else a key
    works: bool = False  # needs the model; refused while it loads or drains
    needs: str = ""  # a switch of ServerSettings; the route is not there while it is off
    says: str = ""  # one line for the documents
    body: Any = None  # type of the JSON body
    needs_body: bool = True
    form: Any = None  # type of the fields of a multipart body
    query: Any = None  # type whose fields are the query's parameters
    answer: Any = None  # type of the answer's JSON; None: see `media`
    status: int = 200  # of that answer
    events: Any = None  # type of one event's data where the answer may be a stream
    error: Any = None  # type of the errors' JSON, where it is another than everywhere
    media: str = "application/json"  # of an answer without a type; empty: it has no body
    probes: bool = False  # its 503 is an answer like the other one, no error
    also: tuple[int, ...] = ()  # statuses of errors beside those that follow from the above
    from_routers: bool = False  # routers call it, so it is on the port of requests in any case


def served_routes(settings: ServerSettings) -> tuple[Row, ...]:
    """Those whose switch is on."""
    return tuple(row for row in ROUTES if not row.needs or getattr(settings, row.needs))


def is_for_administrators(row: Row) -> bool:
    """On their listener alone, where there is one."""
    is_theirs = row.access == "admin" or row.needs == "dev_mode"
    return is_theirs and not row.from_routers


# /metrics is public because scrapers of clusters send no key; it holds no prompt and no key.
ROUTES = (
    Row("POST", "/v1/chat/completions", chat_completions, "key", works=True,
        says="Answer a conversation", body=schemas.ChatCompletionRequest,
        answer=response_schemas.ChatCompletion, events=response_schemas.ChatCompletionChunk),
    Row("GET", "/v1/models", models.list_models, "key",
        says="The models served here; in Anthropic's shape for clients that send anthropic-version",
        query=models.ModelsQuery, answer=response_schemas.ModelList),
    Row("GET", "/v1/models/{model:path}", models.get_model, "key",
        says="One model", answer=response_schemas.ModelCard, also=(404,)),
    Row("POST", "/v1/completions", completions, "key", works=True,
        says="Continue one or several prompts", body=schemas.CompletionRequest,
        answer=response_schemas.CompletionAnswer, events=response_schemas.CompletionChunk),
    Row("POST", "/v1/responses", create_response, "key", works=True,
        says="Answer in OpenAI's Responses shape", body=response_bodies.ResponsesRequest,
        answer=response_shapes.ResponseObject, events=response_shapes.Event),
    Row("POST", "/v1/responses/input_tokens", count_input_tokens, "key", works=True,
        says="How many tokens a prompt has", body=response_bodies.InputTokensRequest,
        answer=response_shapes.InputTokens),
    Row("GET", "/v1/responses/{response_id}", stored_responses.get_response, "key",
        says="A stored response", query=response_bodies.ResponseQuery,
        answer=response_shapes.ResponseObject, events=response_shapes.Event, also=(400, 404)),
    Row("DELETE", "/v1/responses/{response_id}", stored_responses.delete_response, "key",
        says="Forget a stored response", answer=response_shapes.DeletedResponse, also=(404,)),
    Row("POST", "/v1/responses/{response_id}/cancel", stored_responses.cancel_response, "key",
        says="End a response that is made in the background", answer=response_shapes.ResponseObject,
        also=(400, 404)),
    Row("GET", "/v1/responses/{response_id}/input_items", stored_responses.list_input_items, "key",
        says="The input items of a stored response", query=response_bodies.InputItemsQuery,
        answer=response_shapes.InputItemList, also=(400, 404)),
    Row("POST", "/v1/messages", create_message, "key", works=True,
        says="Answer in Anthropic's Messages shape", body=message_bodies.MessagesRequest,
        answer=message_shapes.AnthropicAnswer, events=message_shapes.MessageEvent,
        error=message_shapes.AnthropicError),
    Row("POST", "/v1/messages/count_tokens", count_tokens, "key", works=True,
        says="The tokens that a message's prompt would have",
        body=message_bodies.CountTokensRequest, answer=message_shapes.TokenCount,
        error=message_shapes.AnthropicError),
    Row("POST", "/v1/messages/batches", message_batches.create_message_batch, "key",
        says="Answer message requests when there is time; 501 without --files-dir",
        body=message_batch_shapes.MessageBatchRequest, answer=message_batch_shapes.MessageBatch,
        error=message_shapes.AnthropicError, also=(501, 503)),
    Row("GET", "/v1/messages/batches", message_batches.list_message_batches, "key",
        says="The message batches that are here", query=message_batch_shapes.MessageBatchesQuery,
        answer=message_batch_shapes.MessageBatchList, error=message_shapes.AnthropicError,
        also=(400, 501)),
    Row("GET", "/v1/messages/batches/{message_batch_id}", message_batches.get_message_batch, "key",
        says="How far a message batch is", answer=message_batch_shapes.MessageBatch,
        error=message_shapes.AnthropicError, also=(404, 501)),
    Row("DELETE", "/v1/messages/batches/{message_batch_id}", message_batches.delete_message_batch,
        "key", says="Forget a message batch that has ended, and its results",
        answer=message_batch_shapes.DeletedMessageBatch, error=message_shapes.AnthropicError,
        also=(400, 404, 501)),
    Row("POST", "/v1/messages/batches/{message_batch_id}/cancel",
        message_batches.cancel_message_batch, "key",
        says="End a message batch; what is answered is kept",
        answer=message_batch_shapes.MessageBatch, error=message_shapes.AnthropicError,
        also=(404, 501)),
    Row("GET", "/v1/messages/batches/{message_batch_id}/results",
        message_batches.get_message_batch_results, "key",
        says="The results of a message batch that has ended, one line a request",
        media="application/x-jsonl", error=message_shapes.AnthropicError, also=(400, 404, 501)),
    Row("POST", "/v1/embeddings", embeddings, "key", works=True,
        says="One vector a text", body=bodies.EmbeddingRequest, answer=shapes.EmbeddingList),
    Row("POST", "/v2/embed", cohere_embed, "key", works=True,
        says="One vector a text, in Cohere's shape", body=bodies.CohereEmbedRequest,
        answer=shapes.CohereEmbedding),
    Row("POST", "/score", score, "key", works=True,
        says="How well pairs of texts fit", body=bodies.ScoreRequest, answer=shapes.ScoreList),
    Row("POST", "/v1/score", score, "key", works=True,
        says="As /score", body=bodies.ScoreRequest, answer=shapes.ScoreList),
    Row("POST", "/rerank", rerank, "key", works=True,
        says="Documents by how well they fit a query", body=bodies.RerankRequest,
        answer=shapes.Ranking),
    Row("POST", "/v1/rerank", rerank, "key", works=True,
        says="As /rerank", body=bodies.RerankRequest, answer=shapes.Ranking),
    Row("POST", "/v2/rerank", rerank_v2, "key", works=True,
        says="As /rerank, in Cohere's shape", body=bodies.RerankRequest, answer=shapes.Ranking),
    Row("POST", "/classify", classify, "key", works=True,
        says="How likely each label is for a text", body=bodies.ClassifyRequest,
        answer=shapes.ClassifiedList),
    Row("POST", "/pooling", pooling, "key", works=True,
        says="What the model gives for a text or its tokens", body=bodies.PoolingBody,
        answer=shapes.PooledList),
    Row("POST", "/v1/chat/completions/batch", chat_batch, "key", works=True,
        says="Answer several conversations", body=ChatBatchRequest,
        answer=response_schemas.ChatCompletion),
    Row("POST", "/v1/chat/completions/render", render.render_chat, "key", works=True,
        says="What a conversation comes to, without an answer",
        body=schemas.ChatCompletionRequest, answer=render.RenderAnswer),
    Row("POST", "/v1/completions/render", render.render_completion, "key", works=True,
        says="What prompts come to, without an answer", body=schemas.CompletionRequest,
        answer=list[render.RenderAnswer]),
    Row("POST", "/inference/v1/generate", token_generate, "key", works=True,
        says="Token ids in, token ids out", body=TokenRequest, answer=TokenAnswer,
        events=TokenChunk),
    Row("POST", "/generative_scoring", generative_scoring, "key", works=True,
        says="How likely some tokens come next, per item", body=GenerativeScoringRequest,
        answer=GenerativeScores),
    Row("POST", "/v1/audio/transcriptions", audio.transcriptions, "key", works=True,
        says="The text of a file of speech", form=AudioForm, answer=audio_shapes.Transcript,
        events=audio_shapes.TranscriptEvent, also=(413, 415)),
    Row("POST", "/v1/audio/translations", audio.translations, "key", works=True,
        says="The English text of a file of speech", form=AudioForm,
        answer=audio_shapes.Transcript, events=audio_shapes.TranscriptEvent, also=(413, 415)),
    Row("GET", "/v1/realtime", not_implemented.realtime, "key",
        says="Not there: it would need a speech model", also=(501,)),
    Row("POST", "/v1/files", files.upload_file, "key", needs="files_dir",
        says="Leave a file of requests here, for a batch", form=batch_shapes.FileForm,
        answer=batch_shapes.FileObject),
    Row("GET", "/v1/files", files.list_files, "key", needs="files_dir",
        says="The files that are here", query=batch_shapes.FilesQuery,
        answer=batch_shapes.FileList, also=(400,)),
    Row("GET", "/v1/files/{file_id}", files.get_file, "key", needs="files_dir",
        says="What is known of a file", answer=batch_shapes.FileObject, also=(404,)),
    Row("DELETE", "/v1/files/{file_id}", files.delete_file, "key", needs="files_dir",
        says="Delete a file", answer=batch_shapes.DeletedFile, also=(404,)),
    Row("GET", "/v1/files/{file_id}/content", files.get_content, "key", needs="files_dir",
        says="What is in a file", media="application/octet-stream", also=(404,)),
    Row("POST", "/v1/batches", batches.create_batch, "key", needs="files_dir",
        says="Answer a file of requests when there is time", body=batch_shapes.BatchRequest,
        answer=batch_shapes.BatchObject, also=(404, 503)),
    Row("GET", "/v1/batches", batches.list_batches, "key", needs="files_dir",
        says="The batches that are here", query=batch_shapes.BatchesQuery,
        answer=batch_shapes.BatchList, also=(400,)),
    Row("GET", "/v1/batches/{batch_id}", batches.get_batch, "key", needs="files_dir",
        says="How far a batch is", answer=batch_shapes.BatchObject, also=(404,)),
    Row("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "key", needs="files_dir",
        says="End a batch; what is answered is kept", answer=batch_shapes.BatchObject, also=(404,)),
    Row("POST", "/v1/load_lora_adapter", adapters.load_adapter, "admin",
        says="Serve a LoRA adapter under a name of its own; 403 without "
        "--allow-runtime-lora-updating", body=adapters.LoadAdapterRequest, media="text/plain",
        also=(403, 404, 503), from_routers=True),
    Row("POST", "/v1/unload_lora_adapter", adapters.unload_adapter, "admin",
        says="Serve a LoRA adapter no longer; what runs with it ends with it",
        body=adapters.UnloadAdapterRequest, media="text/plain", also=(403, 404),
        from_routers=True),
    Row("POST", "/abort_requests", abort_requests, "admin",
        says="End requests by their ids", body=AbortRequest, answer=Aborted),
    Row("POST", "/invocations", sagemaker.invocations, "key", works=True,
        says="Whatever the body has the shape of, for SageMaker", body=dict[str, Any]),
    Row("GET", "/ping", sagemaker.ping, "public", says="As /health, for SageMaker", media="",
        probes=True),
    Row("POST", "/ping", sagemaker.ping, "public", says="As /health, for SageMaker", media="",
        probes=True),
    Row("GET", "/load", models.load, "public", says="Requests in flight",
        answer=response_schemas.ServerLoad),
    Row("GET", "/tokenizer_info", tokenize.tokenizer_info, "key", works=True,
        needs="tokenizer_info", says="Special tokens and chat template",
        answer=response_schemas.TokenizerInfo),
    Row("POST", "/sleep", dev.sleep, "admin", needs="dev_mode",
        says="Refuse work and give memory back: the KV cache's, on a GPU the weights' too",
        query=dev.SleepQuery, media=""),
    Row("POST", "/wake_up", dev.wake_up, "admin", needs="dev_mode",
        says="Take the memory and work again", query=dev.WakeQuery, media=""),
    Row("GET", "/is_sleeping", dev.is_sleeping, "key", needs="dev_mode",
        says="Whether the server sleeps", answer=dev.Sleeping),
    Row("POST", "/pause", dev.pause, "admin", needs="dev_mode",
        says="Generate nothing and let what comes wait", query=dev.PauseQuery,
        answer=dev.Paused),
    Row("POST", "/resume", dev.resume, "admin", needs="dev_mode",
        says="Go on after a pause", answer=dev.Paused),
    Row("GET", "/is_paused", dev.is_paused, "key", needs="dev_mode",
        says="Whether the server pauses", answer=dev.Paused),
    Row("GET", "/get_world_size", dev.world_size, "key", needs="dev_mode",
        says="How many processes hold weights", answer=dev.WorldSize),
    *(
        Row("POST", path, not_implemented.weight_update, "admin", needs="dev_mode",
            says="Not there", also=(501,))
        for path in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
                     "/finish_weight_update", "/release_kv_cache_memory")
    ),
    Row("POST", "/reset_prefix_cache", dev.reset_prefix_cache, "admin", needs="dev_mode",
        says="Forget all cached prefixes", works=True, media=""),
    Row("POST", "/reset_mm_cache", dev.reset_nothing, "admin", needs="dev_mode",
        says="Accepted without effect: the server has no such cache", media=""),
    Row("POST", "/reset_encoder_cache", dev.reset_nothing, "admin", needs="dev_mode",
        says="Accepted without effect: the server has no such cache", media=""),
    Row("POST", "/start_profile", dev.start_profile, "admin", needs="dev_mode",
        says="Record the engine's steps", media=""),
    Row("POST", "/stop_profile", dev.stop_profile, "admin", needs="dev_mode",
        says="Write what was recorded, for ui.perfetto.dev", answer=dev.ProfileAnswer, also=(400,)),
    Row("GET", "/server_info", dev.server_info, "admin", needs="dev_mode",
        says="Settings and environment, without secrets", query=dev.InfoQuery,
        answer=dev.ServerInfo),
    Row("POST", "/collective_rpc", not_implemented.collective_rpc, "admin", needs="dev_mode",
        says="Not there", body=not_implemented.WorkerCall, also=(501,)),
    Row("POST", "/tokenize", tokenize.tokenize, "key", works=True,
        says="The tokens of a prompt or conversation", body=schemas.TokenizeRequest,
        answer=response_schemas.Tokenized),
    Row("POST", "/detokenize", tokenize.detokenize, "key", works=True,
        says="The text of tokens", body=schemas.DetokenizeRequest,
        answer=response_schemas.Detokenized),
    Row("GET", STREAM_PATH, stream, "key",
        says="Load and KV residency for a router, as frames of msgpack",
        media="application/octet-stream"),
    Row("POST", DRAIN_PATH, drain.drain, "admin",
        says="Stop taking work, finish what is in flight, exit",
        answer=response_schemas.DrainStatus,
        status=202),
    Row("GET", "/health", probes.health, "public", says="200 while the engine makes progress",
        media="", probes=True),
    Row("GET", "/healthz", probes.health, "public", says="As /health", media="",
        probes=True),
    Row("GET", "/livez", probes.livez, "public", says="For liveness probes: 503 once restarting "
        "would help", answer=response_schemas.Probe, probes=True),
    Row("GET", "/ready", probes.ready, "public", says="200 while new work is welcome",
        answer=response_schemas.Probe, probes=True),
    Row("GET", "/readyz", probes.ready, "public", says="As /ready",
        answer=response_schemas.Probe, probes=True),
    Row("GET", "/version", models.version, "public", says="The release of this server",
        answer=response_schemas.Version),
    Row("GET", "/", endpoints.home, "public", needs="docs", says="A page with a chat",
        media="text/html"),
    *(
        Row("GET", f"/console/{name}", endpoints.chat_file(name), "public", needs="docs",
            says="A part of that page", media=kind.partition(";")[0])
        for name, (_, kind) in CHAT_FILES.items()
    ),
    Row("GET", "/openapi.json", endpoints.openapi, "public", needs="docs", says="This description",
        answer=endpoints.OpenApi),
    Row("GET", "/docs", endpoints.page, "public", needs="docs", says="A page that shows it",
        media="text/html"),
    Row("GET", "/redoc", endpoints.page, "public", needs="docs", says="As /docs",
        media="text/html"),
    Row("GET", "/metrics", probes.metrics, "public", says="Metrics in Prometheus's text format",
        media="text/plain"),
)  # fmt: skip
