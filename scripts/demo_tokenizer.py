"""The demo tokenizer: byte-level BPE of 2,048 entries in the shape of Qwen's, and the JSON files that go beside it.
Digits stand alone, so that sums can be learned; the three special tokens are the last ids."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's pattern
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}"
    '{{- \'Call one with <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n\' }}{%- endif %}'
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    '{{- \'\\n<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; markers inside the texts are taken out first, for they are special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text.replace(IM_START, "").replace(IM_END, "") for text in texts), trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, expected {VOCAB_SIZE}; give it more text"
        )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(number): {"content": token, **entry} for token, number in ids.items()},
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "pad_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
