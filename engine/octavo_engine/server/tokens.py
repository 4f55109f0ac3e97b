"""POST /tokenize and /detokenize: the model's tokenizer as a service."""

from __future__ import annotations

import asyncio

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.prompts import INLINE_CHARS, encode, render
from octavo_engine.server.schemas import DetokenizeRequest, TokenizeRequest
from octavo_engine.server.service import Service  # noqa: TC001


async def tokenize(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(TokenizeRequest)
    service.check_model(request.model)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = await encode(tokenizer, request.prompt, add_special_tokens=special)
    else:
        settings = service.settings
        text = await render(
            tokenizer,
            request.conversation,
            settings.limits,
            trust_template=settings.trust_request_chat_template,
        )
        special = bool(request.add_special_tokens)
        ids = await encode(tokenizer, text, add_special_tokens=special)
    texts = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    await exchange.reply(
        msgspec.json.encode(
            {
                "count": len(ids),
                "max_model_len": info.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )
    )


async def detokenize(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(DetokenizeRequest)
    service.check_model(request.model)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    for token in request.tokens:
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"tokens: token id {token} is not in the vocabulary of {info.vocab_size}",
                param="tokens",
            )
    if len(request.tokens) <= INLINE_CHARS:
        text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    await exchange.reply(msgspec.json.encode({"prompt": text}))
