"""Which ids a client may give to a request.

An id stands in a line of the log, in the header X-Request-Id, in the path of /v1/routing/{id} and in metrics of
clients. So it has no white space and no control character, nothing that a path or a query gives a meaning (/ ? # %),
no quote, and an end. UUIDs, hashes, times and `trajectory:3@step=12` are ids."""

import re

REQUEST_ID = re.compile(r"[A-Za-z0-9._~:@=+,-]{1,256}")
REQUEST_ID_RULE = "1 to 256 of A-Z a-z 0-9 . _ - ~ : @ = + ,"
