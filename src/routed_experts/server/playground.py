"""GET /: the playground, one HTML file with a content security policy.

Nothing loads from another origin. Only the script and the style inside the file run: the policy lists their hashes."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def make_page() -> Response:
    """Build the response."""
    html = (files("routed_experts.server") / "playground.html").read_text(encoding="utf-8")
    script, style = _sources(html, "script"), _sources(html, "style")
    policy = (
        f"default-src 'self'; script-src {script}; style-src {style}; connect-src 'self'; img-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


def _sources(html: str, tag: str) -> str:
    """Return the policy's source list for one tag: the hashes of its elements in the file."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in hashes)
