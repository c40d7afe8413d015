"""A Qwen3-MoE checkpoint of two layers, with random weights, that draft models are tried beside."""

V, CONTEXT = 60, 96
SIZES = dict(
    num_hidden_layers=2,
    mlp_only_layers=[],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    moe_intermediate_size=16,
    num_experts=6,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    initializer_range=0.3,
    eos_token_id=None,
    bos_token_id=None,
)


def write_target(folder, *, seed=0, **changed):
    """Save the checkpoint in a folder; returns its transformers model. `changed`: keys of its config."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = dict(vocab_size=V, hidden_size=16, max_position_embeddings=CONTEXT)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | sizes | changed)).eval()
    model.save_pretrained(folder)
    return model
