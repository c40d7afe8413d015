// Rows of an answer, read as a client does that has no package of ours. Knows the int32 form of /v1.
import assert from "node:assert/strict";

// Expert ids of one choice: [row][layer] -> array of topK. Checked: a row for each token but the last, the bytes against the sidecar's
// shape, -1 in dense layers, ids in range and distinct.
export function rowsOf(choice, totalTokens) {
  const info = choice.meta_info.routed_experts_info;
  const bytes = Uint8Array.from(Buffer.from(choice.meta_info.routed_experts, "base64"));
  const ids = new Int32Array(bytes.buffer);
  const [numRows, numLayers, topK] = info.shape;
  assert.equal(numRows, totalTokens - 1);
  assert.equal(ids.length, numRows * numLayers * topK);
  const at = (row, layer) => [...ids.subarray((row * numLayers + layer) * topK, (row * numLayers + layer + 1) * topK)];
  const rows = [...Array(numRows).keys()].map((row) => [...Array(numLayers).keys()].map((layer) => at(row, layer)));
  for (const row of rows) {
    row.forEach((cell, layer) => {
      if (!info.moe_layer_ids.includes(layer)) assert.ok(cell.every((id) => id === -1), `layer ${layer} is dense`);
      else assert.ok(new Set(cell).size === topK && cell.every((id) => id >= 0 && id < info.num_experts), String(cell));
    });
  }
  return rows;
}
