"""What the flags of the configs mean: the text of --help, and of docs/settings.md, which is made from it.

Fields are named by the destination of their flag: with the prefix `placement_` or `speculative_` where that has one."""

from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.core.speculative_config import ALGORITHMS
from routed_experts.fleet.settings import ROUTING_POLICIES

_ENGINE: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "the same as MODEL",
        "revision": "branch, tag or commit of a Hugging Face id",
        "tokenizer_path": "folder or Hugging Face id of another tokenizer, or demo",
        "dtype": "dtype of weights and activations; auto: the checkpoint's",
        "quantization": "matrices in memory; auto: codes of the checkpoint stay codes where kernels take them; "
        "none: all are dequantised; fp8_block: those of layers are e4m3 codes",
        "kv_cache_dtype": "dtype of keys and values; auto: that of --dtype",
        "device": "the kind of device that must be there; JAX_PLATFORMS chooses it",
        "random_seed": "seeds of sampled requests that bring none are counted on from it",
        "context_length": "tokens of a sequence at most, prompt and output",
        "tp_size": "devices that share the model",
        "ep_size": "1: each device has a part of the width of every expert; the same as --tp-size: whole experts",
        "dp_size": "data ranks, which divide the devices; each has a KV cache and requests of its own",
        "page_size": "tokens of a page of the KV cache; requests share whole pages of a prefix",
        "mem_fraction_static": "part of a device's memory for weights and the KV cache",
        "max_total_tokens": "tokens in the KV cache of a data rank",
        "max_running_requests": "requests of a data rank that run at once; further ones wait",
        "max_queued_requests": "requests that may wait; further ones are refused, over HTTP with status 429",
        "chunked_prefill_size": "tokens of a prompt that one step takes at most; a longer prompt takes several steps",
        "max_prefill_tokens": "tokens of prompts that one step takes at most",
        "precompile_bs_paddings": "sizes of decode steps, in requests; a step is padded to the next one",
        "precompile_token_paddings": "sizes of steps with prompts, in tokens; a step is padded to the next one",
        "disable_radix_cache": "requests share no prefixes",
        "attention_backend": "kernels of attention: gpu, native, paged, reference or tpu; auto: the platform's own "
        "where they take the model, else paged",
        "moe_backend": "kernels of all matrices: gpu, grouped, native, reference, tiled or tpu; auto: the platform's "
        "own where they take the model, else tiled",
        "enable_return_routed_experts": "record the experts of every token; requests may ask for them",
        "enable_return_routed_experts_weights": "record the combine weights of the experts of every token; it needs "
        "--enable-return-routed-experts",
        "routed_experts_weights_dtype": "dtype of recorded combine weights",
        "logprobs_mode": "processed: logprobs of the distribution that a token is sampled from; raw: the model's own",
        "deterministic": "bits of an answer do not depend on the other requests of a step; slower",
        "skip_tokenizer_init": "serve token ids, without a tokenizer",
        "weight_version": "label of the weights that the engine starts with",
    }
)
_OFFLOAD: Mapping[str, str] = MappingProxyType(
    {
        "kt_num_gpu_experts": "experts of each MoE layer on the accelerator; the host runs the others",
        "num_device_experts": "the same as --kt-num-gpu-experts",
        "kt_weight_path": "folder of the experts' safetensors",
        "kt_method": "number format of experts on the host: auto (the model's), bf16 or f32",
        "kt_cpuinfer": "threads for experts on the host",
        "kt_threadpool_count": "pools of threads for experts on the host; 1 alone is accepted",
        "kt_max_deferred_experts_per_token": "lightest experts of a token that decode steps may add one MoE layer "
        "late, where the host runs them; changes the model",
        "kt_gpu_prefill_token_threshold": "steps of at least so many tokens copy the host's experts to the accelerator",
        "residency": "which experts are on the accelerator; first: by id; adaptive: by id at first, then by load; "
        "a file: as its plan says",
    }
)
_PLACEMENT: Mapping[str, str] = MappingProxyType(
    {
        "placement_plan": "a plan written by `placement --save`; it needs --ep-size",
        "placement_mode": "replicas: slots are spread over the instances of their expert; reroute: instances have "
        "capacities, which changes the model",
        "placement_capacity_factor": "of --placement-mode reroute: an instance takes at most that many times its "
        "even share, such as 1.25, 5/4 or inf",
        "placement_on_exhausted": "of --placement-mode reroute, for a slot without room: its best expert runs "
        "anyway (overflow), or none (drop)",
        "placement_rebalance_every": "steps after which a new plan is made from the load; 0: never",
        "placement_layers_per_step": "MoE layers whose experts are moved between two steps",
        "placement_num_groups": "groups of experts; a group is on one node where --num-nodes divides their number",
        "placement_num_nodes": "nodes among which the devices are divided",
        "placement_expert_share": "estimated part of a step that the experts take, to decide whether a move of "
        "experts pays",
        "placement_link_bytes_per_s": "estimated bytes a second between devices, to decide whether a move of "
        "experts pays",
    }
)
_SPECULATIVE: Mapping[str, str] = MappingProxyType(
    {
        "speculative_algorithm": f"what drafts: {', '.join(ALGORITHMS)}",
        "speculative_num_draft_tokens": "tokens of a request in a step that verifies drafts: the last known one and "
        "its drafts",
        "speculative_num_steps": "drafts of a request in a step",
        "speculative_eagle_topk": "continuations of a token; 1 alone is accepted: drafts are chains",
        "speculative_draft_model_path": "folder of an EAGLE or EAGLE3 head, or of a STANDALONE model",
        "speculative_eagle_layers": "of EAGLE3: layers whose outputs the head reads, counted from 0",
        "speculative_ngram_min_match_window_size": "of NGRAM: tokens of the shortest suffix that is looked up",
        "speculative_ngram_max_match_window_size": "of NGRAM: tokens of the longest suffix that is looked up",
        "speculative_ngram_min_bfs_breadth": "breadth of a tree of drafts; 1 alone is accepted",
        "speculative_ngram_max_bfs_breadth": "breadth of a tree of drafts; 1 alone is accepted",
        "speculative_ngram_match_type": "of NGRAM: BFS continues the latest of equal suffixes; PROB is refused",
        "speculative_ngram_max_trie_depth": "of SGLang's trie; has no effect",
        "speculative_ngram_branch_length": "of SGLang's trie; has no effect",
        "speculative_ngram_capacity": "of SGLang's trie; has no effect",
        "speculative_suffix_max_tree_depth": "of SUFFIX: tokens of the longest suffix that is looked up",
        "speculative_suffix_max_spec_factor": "of SUFFIX: drafts for each matching token",
        "speculative_suffix_min_token_prob": "of SUFFIX: least estimated probability of a draft",
        "speculative_suffix_max_cached_requests": "of SUFFIX: answers that are remembered at most",
        "speculative_scope": "of NGRAM and SUFFIX, whose text drafts may hold: the request's own and that of choices "
        "of its prompt (request), or also remembered answers to requests of its extra_key (namespace)",
        "speculative_remember": "of NGRAM and SUFFIX: remember answers of ended requests, as drafts of later ones",
        "speculative_store_bytes": "of NGRAM and SUFFIX: bytes of host memory for remembered answers",
        "speculative_accept_threshold_single": "1.0 alone is accepted: tokens are the model's own",
        "speculative_accept_threshold_acc": "1.0 alone is accepted: tokens are the model's own",
        "speculative_adaptive": "draft fewer tokens, or none, where more do not pay",
    }
)
_DIST: Mapping[str, str] = MappingProxyType(
    {
        "nnodes": "processes that share the model, one a host",
        "node_rank": "which of --nnodes processes this is; 0 serves, the others follow",
        "dist_init_addr": "host:port where process 0 listens, as the other processes reach it; the next port is used "
        "as well",
        "dist_timeout": "seconds for the start of the process group and for each phase of it",
        "watchdog_timeout": "seconds of silence after which a process is lost and the process group ends",
    }
)
_FLEET: Mapping[str, str] = MappingProxyType(
    {
        "num_replicas": "engines behind the endpoint, with Ray Serve",
        "routing_policy": f"{' or '.join(ROUTING_POLICIES)} (by the hash of the header x-session-id, not by load: "
        "a full replica answers its sessions with 429 while another has room)",
        "ray_address": "auto or host:port of a Ray cluster",
        "replica_startup_timeout": "seconds until all replicas are ready",
        "weight_update_timeout": "seconds in which all replicas load new weights",
    }
)
MEANINGS: Mapping[str, str] = MappingProxyType({**_ENGINE, **_OFFLOAD, **_PLACEMENT, **_SPECULATIVE, **_DIST, **_FLEET})
_DEFAULTS: Mapping[str, str] = MappingProxyType(  # of fields whose default says too little
    {
        "model_path": "none",
        "revision": "the main branch",
        "tokenizer_path": "the model's own",
        "context_length": "the model's own",
        "max_total_tokens": "what fits, at most twice the running requests at full length",
        "max_running_requests": "the largest of --precompile-bs-paddings",
        "chunked_prefill_size": "the largest of --precompile-token-paddings",
        "max_prefill_tokens": "the largest of --precompile-token-paddings",
        "precompile_bs_paddings": "1 8 32 up to --max-running-requests",
        "precompile_token_paddings": "64 256 1024 up to --max-prefill-tokens",
        "kt_num_gpu_experts": "all",
        "num_device_experts": "all",
        "kt_weight_path": "the model's own",
        "kt_cpuinfer": "one fewer than the cores of this process",
        "kt_threadpool_count": "1",
        "kt_gpu_prefill_token_threshold": "no step does",
        "placement_plan": "none",
        "placement_capacity_factor": "none; --placement-mode reroute needs one",
        "speculative_algorithm": "none: nothing is drafted",
        "speculative_num_draft_tokens": "8; of a draft model 4",
        "speculative_num_steps": "one less than --speculative-num-draft-tokens",
        "speculative_draft_model_path": "none; EAGLE3 and STANDALONE need one",
        "speculative_eagle_layers": "those that the head's config names",
        "speculative_suffix_max_cached_requests": "any number that fits --speculative-store-bytes",
        "speculative_ngram_max_trie_depth": "none",
        "speculative_ngram_branch_length": "none",
        "speculative_ngram_capacity": "none",
        "dist_init_addr": "none; several processes need one",
        "num_replicas": "1, without Ray",
        "ray_address": "a Ray of this machine is started",
    }
)


def describe(name: str, default: object) -> str:
    """The help of a flag by its destination: what it means and, but for a switch that is off, its default."""
    meaning = MEANINGS[name]
    if default is False:
        return meaning
    number = f"{default:g}" if isinstance(default, float) else default
    return f"{meaning}; default: {_DEFAULTS.get(name, number)}"
