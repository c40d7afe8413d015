"""The ids of answers of a fleet, through either proxy of Ray Serve."""

import re
import uuid


def check_ids(client):
    """An answer, streamed or not, has one X-Request-Id, the id of its request: the client's, also a UUID, or a
    replica's. Errors have it, too."""
    for given in (None, "mine-7", str(uuid.uuid4())):
        for field in ("x-request-id", "rid"):
            named = {} if given is None else {"headers": {"x-request-id": given}}
            body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
            if field == "rid" and given is not None:
                named, body = {"headers": {"x-request-id": "other"}}, {**body, "rid": given}
            response = client.post("/generate", json=body, **named)
            _check_id(response, response.json()["meta_info"]["id"], given)
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}) as response:
        made = re.search(r'"id":"(cmpl-r\d+-[0-9a-f]{32})"', response.read().decode())[1]
        assert response.headers.get_list("x-request-id") == [made]
    response = client.get("/no/such/route", headers={"x-request-id": "mine-8"})
    assert response.status_code == 404 and response.headers.get_list("x-request-id") == ["mine-8"]


def _check_id(response, request_id, given):
    assert response.headers.get_list("x-request-id") == [request_id]
    assert request_id == given if given is not None else re.fullmatch(r"r\d+-[0-9a-f]{32}", request_id)
