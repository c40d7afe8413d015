"""GET /: one HTML file for trying the server out, with what it may load nailed down. Knows nothing of its content.

Nothing comes from another origin, and only the script and style that stand in the file run: their hashes are in the
policy."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def make_page() -> Response:
    """The page as a response that may be sent many times."""
    html = (files("routed_experts.server") / "playground.html").read_text(encoding="utf-8")
    script, style = _sources(html, "script"), _sources(html, "style")
    policy = (
        f"default-src 'self'; script-src {script}; style-src {style}; connect-src 'self'; img-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


def _sources(html: str, tag: str) -> str:
    """What the policy allows of a kind: the elements of the file by their hashes."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{one}'" for one in hashes)
