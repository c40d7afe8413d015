"""A quantised checkpoint over HTTP: rows, what /server_info says, and updates from folders of codes and of plain
weights."""

import pytest

from routed_experts import extract_routed_experts_from_meta_info
from support.engines import open_engine
from support.http_server import parse_error, running
from support.quantized_checkpoints import forms, quantize_folder
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

PROMPT = [5, 6, 7] * 8
ASK = {
    "input_ids": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
    "return_logprob": True,
    "return_routed_experts": True,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of two models: plain0 and plain1, and the same as codes, codes0 and codes1."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        plain = write_tiny_checkpoint(folder / f"plain{seed}", seed=seed, tokenizer=False)
        quantize_folder(plain, folder / f"codes{seed}", folder / f"copy{seed}", forms()["fp8 blocks"])
    write_tiny_checkpoint(folder / "other", num_experts=8, tokenizer=False)
    return folder


def answer(server):
    """Tokens, logprobs and rows."""
    result = server.post("/generate", ASK).json()
    rows = extract_routed_experts_from_meta_info(result)
    assert rows.size == (len(PROMPT) + 5) * 4 * 4
    return result["output_ids"], result["meta_info"]["output_token_logprobs"], rows.tobytes()


def test_codes_are_served_and_updated_over_http_from_folders_of_both_forms(root):
    """Plain folders are quantised to the codes that a script wrote into the others, to the bit."""
    options = dict(enable_return_routed_experts=True, skip_tokenizer_init=True)
    with (
        open_engine(root / "codes0", **options) as engine,
        running(engine, weights_root=str(root)) as server,
    ):
        info = server.client.get("/server_info").json()
        assert info["quantization"] == "auto"
        assert "fp8 (blocks 128 x 128), 163 tensors served as codes" in info["memory_plan"][0]
        first = answer(server)

        def updated(name):
            body = {"model_path": name, "weight_version": name}
            assert server.post("/update_weights_from_disk", body).json()["success"], name
            return answer(server)

        second = updated("codes1")
        assert second[0] != first[0] and second[2] != first[2]
        assert updated("plain0") == first
        assert updated("plain1") == second
        refused = parse_error(server.post("/update_weights_from_disk", {"model_path": "other"}), 400)
        assert refused["param"] == "model_path" and "another model" in refused["message"]
        assert answer(server) == second
        assert updated("codes0") == first
        assert server.client.get("/get_weight_version").json() == {"weight_version": "codes0", "update_count": 4}
