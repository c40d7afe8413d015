"""Extra key: text that a request may carry; requests of equal keys share cached prefixes and remembered answers."""

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError

MAX_EXTRA_KEY_CHARS = 4096


def check_extra_key(key: object, *, param: str = "extra_key") -> str | None:
    """Return a key that a caller gave, None without one. Raises InvalidRequestError naming `param`."""
    if key is None:
        return None
    if not isinstance(key, str):
        text = f"{PARAM}={short_repr(key)} must be text: requests of equal keys share cached prefixes"
        raise InvalidRequestError(f"{text}; give text, or leave it out", param=param)
    if len(key) > MAX_EXTRA_KEY_CHARS:
        text = f"{PARAM} has {len(key)} characters, above the limit of {MAX_EXTRA_KEY_CHARS}"
        raise InvalidRequestError(f"{text}; give a shorter one, such as a hash of it", param=param)
    return key


def combine_keys(extra_key: str | None, cache_salt: str | None) -> str | None:
    """Return the key of a request that may have one by each name: one alone is the key; two are
    "<characters of the salt>:<salt><extra_key>", another text for each pair. Raises InvalidRequestError."""
    check_extra_key(extra_key)
    check_extra_key(cache_salt, param="cache_salt")
    if not extra_key or not cache_salt:
        return extra_key or cache_salt
    key = f"{len(cache_salt)}:{cache_salt}{extra_key}"
    if len(key) > MAX_EXTRA_KEY_CHARS:
        text = f"{PARAM} of {len(extra_key)} characters and cache_salt of {len(cache_salt)} make a key of {len(key)}"
        text = f"{text}, above the limit of {MAX_EXTRA_KEY_CHARS}"
        raise InvalidRequestError(f"{text}; shorten one of them, such as to a hash of it", param="extra_key")
    return key
