"""Range: a part of a body, as RFC 9110 §14 has it. One part at a time; several, or another unit, give the whole. Knows
no body."""

import re

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.server.errors import ApiError, answer_of
from routed_experts.server.reply import json_reply

_PART = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def partial(request: Request, body: bytes, whole: Response) -> Response:
    """The part that the request asks for (206), 416 for one that does not exist, or `whole`, whose headers both have.
    `If-Range` holds the ETag that the part must be of."""
    found = _PART.fullmatch(request.headers.get("range", "").replace(" ", ""))
    wanted = request.headers.get("if-range")
    if found is None or found[0] == "bytes=-" or wanted not in (None, whole.headers.get("etag")):
        return whole
    size = len(body)
    if found[1]:
        first, last = int(found[1]), min(int(found[2]), size - 1) if found[2] else size - 1
        if found[2] and int(found[2]) < first:
            return whole  # no range at all
    else:  # the last so many bytes
        first, last = max(size - int(found[2]), 0), size - 1
    if first > last:
        error = ApiError(
            f"Range begins at byte {first} of {size}; ask for bytes 0 to {size - 1}",
            status=416,
            code="range_not_satisfiable",
        )
        return json_reply(answer_of(error).body, status=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {name: value for name, value in whole.headers.items() if name != "content-length"}
    return Response(
        body[first : last + 1], status_code=206, headers={**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
    )
