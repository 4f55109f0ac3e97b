"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.prompts import COUNTED, encode
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.chat.conversation import rendered
from octavo_engine.server.openai.chat.pictures import counted_with_pictures, media_kind
from octavo_engine.server.openai.response_schemas import TokenizerInfo
from octavo_engine.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.tokenization.chat_template import ChatTemplate
from octavo_engine.tokenization.threads import off_loop

if TYPE_CHECKING:
    from octavo_engine.tokenization.tokenizer import Tokenizer


async def tokenize(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(TokenizeRequest)
    service.model.check_name(request.model)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    most = COUNTED * info.max_model_len
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = await encode(tokenizer, request.prompt, add_special_tokens=special, most=most)
    else:
        settings = service.settings
        prompt = await rendered(
            tokenizer,
            request.conversation,
            settings.limits,
            trust_template=settings.trust_request_chat_template,
            add_special_tokens=bool(request.add_special_tokens),
            describes_tools=service.model.dialect.describes_tools,
            most=most,
            takes=media_kind(service),
        )
        ids = (
            await counted_with_pictures(
                service, request.messages or [], prompt, owner_of(exchange, service.guard)
            )
        ).ids
    texts = [tokenizer.token_name(token) for token in ids] if request.return_token_strs else None
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
    service.model.check_name(request.model)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    for token in request.tokens:
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"tokens: token id {token} is not in the vocabulary of {info.vocab_size}",
                param="tokens",
            )
    text = await off_loop(
        lambda: tokenizer.decode(request.tokens, skip_special_tokens=False), len(request.tokens)
    )
    await exchange.reply(msgspec.json.encode({"prompt": text}))


async def tokenizer_info(exchange: Exchange, service: Service) -> None:
    """There only where the operator allows it: it shows the chat template."""
    tokenizer, info = service.engine.tokenizer, service.engine.info
    eos = tokenizer.eos_token_ids
    answer = TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=info.max_model_len,
        bos_token=_text(tokenizer, tokenizer.bos_token_id),
        eos_token=_text(tokenizer, eos[0] if eos else None),
        eos_token_ids=list(eos),
        special_tokens={str(i): tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)},
        chat_template=_template(tokenizer),
    )
    await exchange.reply(msgspec.json.encode(answer))


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)


def _template(tokenizer: Tokenizer) -> str | dict[str, str] | None:
    template = tokenizer.chat_template
    if not isinstance(template, ChatTemplate):
        return None
    sources = template.sources
    return sources["default"] if len(sources) == 1 else dict(sources)
