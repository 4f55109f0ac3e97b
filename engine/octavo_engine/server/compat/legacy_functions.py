"""functions and function_call, which came before tools: read as tools, answered in that form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import rename

if TYPE_CHECKING:
    from octavo_engine.errors import RequestError
    from octavo_engine.server.openai.schemas import ChatCompletionRequest, ChatMessageBody


def adopt_functions(request: ChatCompletionRequest) -> bool:
    """The request in terms of tools; true if it spoke of functions. Raises InvalidRequest."""
    _adopt_history(request.messages)
    if request.functions is None:
        if request.function_call not in (None, "none", "auto"):
            raise InvalidRequest("function_call needs functions", param="function_call")
        return False
    for field in ("tools", "tool_choice"):
        if getattr(request, field) is not None:
            raise InvalidRequest(f"functions and {field} exclude each other", param="functions")
    if not request.functions:
        raise InvalidRequest("functions must not be empty; leave it out", param="functions")
    request.tools = [{"type": "function", "function": item} for item in request.functions]
    request.tool_choice = _choice(request.function_call)
    request.parallel_tool_calls = False
    return True


def rename_tools(error: RequestError) -> None:
    """Blame the field that the client sent."""
    param = error.param or ""
    if param == "tool_choice":
        rename(error, "function_call")
    elif param.startswith("tools"):
        rename(error, "functions" + param.removeprefix("tools").replace(".function", "", 1))


def _choice(function_call: Any) -> Any:
    match function_call:
        case None | "none" | "auto":
            return function_call
        case {"name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            raise InvalidRequest(
                'function_call must be none, auto or {"name": …}', param="function_call"
            )


def _adopt_history(messages: list[ChatMessageBody]) -> None:
    """A call and its result find each other by place: give them an id."""
    call_id = ""
    for number, message in enumerate(messages):
        call = message.function_call
        if call is not None:
            if not isinstance(call.get("name"), str):
                field = f"messages[{number}].function_call"
                raise InvalidRequest(f"{field} needs a name", param=field)
            call_id = f"call_{number}"
            message.tool_calls = [{"id": call_id, "type": "function", "function": call}]
        if message.role == "function":
            message.role, message.tool_call_id = "tool", call_id
