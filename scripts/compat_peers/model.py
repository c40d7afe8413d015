"""The models that clients and peers' tests meet: the demo model, with a chat template that has a place for tools."""

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from routed_experts.demo import demo_model_path

CONTEXT = 8192  # of the model of the peers' tests: the demo model has 1,024, and tests set as many as 8,192
# The demo model's own, and before the messages the tools in the words of Hermes and Qwen.
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall one as <tool_call>{"name": name, "arguments": object}</tool_call><|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>' + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def model_with_tools(folder: Path) -> Path:
    """The demo model, with a chat template that has a place for tools."""
    model = folder / "model"
    if not model.is_dir():
        shutil.copytree(demo_model_path(), model, ignore=shutil.ignore_patterns("draft_head", "README.md"))
        _change(model / "tokenizer_config.json", chat_template=TEMPLATE)
    return model


def model_of_tests(folder: Path) -> Path:
    """Moreover with CONTEXT positions, and ends that it hardly chooses (their rows of the embedding are zero): prompts
    and answers of the tests are as long as those of the models that they name."""
    if (folder / "model").is_dir():
        return folder / "model"
    model = model_with_tools(folder)
    _change(model / "tokenizer_config.json", model_max_length=CONTEXT)
    config = _change(model / "config.json", max_position_embeddings=CONTEXT)
    ids = [config["eos_token_id"], config["pad_token_id"]]
    _clear_rows(model / "model.safetensors", "model.embed_tokens.weight", ids, num_rows=config["vocab_size"])
    return model


def _change(file: Path, **fields: object) -> dict[str, int]:
    """Set fields of a JSON file; all of them."""
    changed = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(changed), encoding="utf-8")
    return changed


def _clear_rows(file: Path, tensor: str, rows: Sequence[int], *, num_rows: int) -> None:
    """Zero rows of a tensor in a safetensors file."""
    content = bytearray(file.read_bytes())
    (header,) = struct.unpack_from("<Q", content)
    begin, end = json.loads(content[8 : 8 + header])[tensor]["data_offsets"]
    size = (end - begin) // num_rows
    for row in rows:
        at = 8 + header + begin + size * row
        content[at : at + size] = bytes(size)
    file.write_bytes(content)
