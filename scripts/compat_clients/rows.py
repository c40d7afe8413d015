"""Rows of an answer, read as a client does that has neither our package nor NumPy. Knows the int32 and the npy form of
/v1."""

import array
import base64


def decode_rows(choice, total_tokens):
    """Expert ids of one choice (a dict), as [row][MoE layer] -> tuple of top_k. Checked: a row for each token but the
    last, the bytes against the sidecar's shape, the fill of dense layers, ids in range and distinct."""
    fields = choice if choice.get("routed_experts") else choice["meta_info"]
    info, raw = fields["routed_experts_info"], base64.b64decode(fields["routed_experts"], validate=True)
    if info["format"] == "npy":
        assert raw[:8] == b"\x93NUMPY\x01\x00", raw[:8]
        raw = raw[10 + int.from_bytes(raw[8:10], "little") :]
    ids = array.array({"int32": "i", "uint8": "B", "uint16": "H"}[info["dtype"]], raw)
    num_rows, num_layers, top_k = info["shape"]
    assert num_rows == total_tokens - 1 and len(ids) == num_rows * num_layers * top_k, (
        info["shape"],
        total_tokens,
        len(ids),
    )
    cells = [
        [tuple(ids[(row * num_layers + layer) * top_k :][:top_k]) for layer in range(num_layers)]
        for row in range(num_rows)
    ]
    for layer in set(range(num_layers)) - set(info["moe_layer_ids"]):
        assert all(row[layer] == (info["dense_fill"],) * top_k for row in cells), f"layer {layer} is dense"
    rows = [[row[layer] for layer in info["moe_layer_ids"]] for row in cells]
    assert all(
        len(set(cell)) == top_k and 0 <= min(cell) <= max(cell) < info["num_experts"] for row in rows for cell in row
    )
    assert len({cell for row in rows for cell in row}) > 1, "one choice of experts everywhere"
    return rows
