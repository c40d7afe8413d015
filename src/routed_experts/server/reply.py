"""Plain JSON answers. Knows nothing of what they say."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_reply(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body; numbers that JSON cannot say become null."""
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")
