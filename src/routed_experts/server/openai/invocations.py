"""POST /invocations: the route of SageMaker's containers, as vLLM serves it."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from routed_experts.server.body import field_names_of, read_raw
from routed_experts.server.errors import ApiError
from routed_experts.server.openai.chat import chat_completions
from routed_experts.server.openai.completions import completions
from routed_experts.server.state import ServerState


async def invocations(request: Request, server: ServerState) -> Response:
    """Answer a body of /v1/chat/completions, which has messages, or of /v1/completions, which has a prompt."""
    raw = await read_raw(request, server.settings)
    names, sent = field_names_of(raw), False

    async def receive() -> Message:
        """The body again, then what comes after it: a disconnect."""
        nonlocal sent
        if sent:
            return await request.receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    again = Request(request.scope, receive)
    if "messages" in names:
        return await chat_completions(again, server)
    if "prompt" in names:
        return await completions(again, server)
    text = "the body has neither messages nor prompt; send the body of /v1/chat/completions or of /v1/completions"
    raise ApiError(text, status=400, code="invalid_request", param="messages")
