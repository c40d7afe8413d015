"""Hugging Face's transformers as the trainer: logprobs of a rollout in bfloat16, with its own routing or recorded
rows.

The model is written as a Hugging Face folder and read back by transformers. Its routers are replaced in place: the
same linear map, softmax over all experts and top-k, then the recorded ids where a row is valid. The weights are its
own scores at the executed ids, renormalised. With no valid row that is what transformers computes. Dims: B
sequences, S tokens of a sequence, G tokens of an answer, N tokens of a batch, M MoE layers, K experts per token, E
experts."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.replay import Sample, align

BATCH = 64  # sequences of a forward


def versions() -> dict[str, str]:
    """Versions and device of the trainer."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}


def hf_config(model: FamilyDecoder) -> dict[str, Any]:
    """config.json of a model of Qwen3-MoE's layers."""
    config = model.config
    spec, feeds, mixer = config.capture_spec, [layer.feed for layer in config.layers], config.layers[0].mixer
    sparse = next(feed for feed in feeds if isinstance(feed, Sparse))
    assert spec is not None and isinstance(mixer, GroupedAttention) and mixer.rotary is not None, config
    base = mixer.rotary.inverse[1] ** (-config.head_dim / 2)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in spec.layer_ids],
        "intermediate_size": next((feed.width for feed in feeds if isinstance(feed, Dense)), sparse.width),
        "moe_intermediate_size": sparse.width,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": sparse.router.renormalize,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": base,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "eos_token_id": None,
    }


class Trainer:
    """A model of transformers whose routers take rows; it computes in `dtype`, and its weights are rounded to
    bfloat16."""

    def __init__(self, model: FamilyDecoder, dtype: torch.dtype = torch.bfloat16) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), hf_config(model), hugging_face_tensors(model, weight_sources(model.config)))
            read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = read.to(self.device).eval()
        self.routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        spec = model.config.capture_spec
        assert spec is not None and len(self.routers) == len(spec.layer_ids), (len(self.routers), spec)

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B S-1], float64, of each next token."""
        with torch.inference_mode():
            ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
            logprobs = torch.log_softmax(self.model(ids, use_cache=False).logits[:, :-1].float(), dim=-1)
            return logprobs.gather(-1, ids[:, 1:, None])[..., 0].double().cpu().numpy()

    def replay(self, ids: np.ndarray, valid: np.ndarray) -> list[torch.Tensor]:
        """The next forwards run ids [B S M K] where `valid` [B S]. They fill the list that is returned with each
        layer's share of replaced slots."""
        rows, flags = (
            torch.as_tensor(ids.astype(np.int64), device=self.device),
            torch.as_tensor(valid.reshape(-1), device=self.device),
        )
        missed: list[torch.Tensor] = []
        for column, router in enumerate(self.routers):
            router.forward = replay_router(router, rows[:, :, column].reshape(-1, rows.shape[-1]), flags, missed)
        return missed


def replay_router(router: Any, ids: torch.Tensor, valid: torch.Tensor, missed: list[torch.Tensor]) -> Any:
    """A router's forward on rows: hidden [N D] -> (logits [N E], weights [N K], ids [N K]), as Qwen3MoeTopKRouter gives
    them."""

    def run(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        scores = torch.softmax(logits, dtype=torch.float, dim=-1)
        native = torch.topk(scores, router.top_k, dim=-1)[1]
        chosen = torch.where(valid[:, None], ids, native)
        absent = ~(chosen[:, :, None] == native[:, None, :]).any(-1)
        missed.append(absent[valid].float().mean() if bool(valid.any()) else torch.zeros((), device=logits.device))
        weights = scores.gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    return run


def training_logprobs(
    model: FamilyDecoder, tokens: np.ndarray, records: list[RoutedExperts], prompt: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Logprobs [B G] of the answers: live, replayed, and of the first sequences with no row valid; and of the first two
    the canary, the share of slots that the trainer's router would not choose."""
    trainer, logprobs_by, missed = Trainer(model), dict[str, np.ndarray](), list[torch.Tensor]()
    parts = [slice(first, first + BATCH) for first in range(0, len(tokens), BATCH)]
    logprobs_by["live"] = np.concatenate(
        [trainer.logprobs(tokens[part]) for part in parts]
    )  # with its own routers, untouched
    samples = [Sample(record, tokens.shape[1]) for record in records]
    routed = align(samples, layout="pad_right", seq_len=tokens.shape[1], spec=model.config.capture_spec)
    trainer.replay(routed.ids[parts[0]], np.zeros_like(routed.valid[parts[0]]))
    logprobs_by["no valid row"] = trainer.logprobs(tokens[parts[0]])
    replayed: list[np.ndarray] = []
    for part in parts:
        shares = trainer.replay(routed.ids[part], routed.valid[part])
        replayed.append(trainer.logprobs(tokens[part]))
        missed += shares
    logprobs_by["replayed"] = np.concatenate(replayed)
    canaries = {"live": 0.0, "replayed": float(torch.stack(missed).mean())}
    return {name: logprobs[:, prompt - 1 :] for name, logprobs in logprobs_by.items()}, canaries
