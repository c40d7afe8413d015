"""Speculative decoding of an engine: what is refused beside it, its draft model, its drafter and its policy."""

import dataclasses
import functools
from collections.abc import Callable

from routed_experts.core.buckets import Buckets
from routed_experts.core.errors import ConfigError
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.build.calibration import measure_costs
from routed_experts.engine.build.draft_model import FoundDraft, find_draft_model
from routed_experts.engine.build.memory_planning import resolve_context_length
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.speculation import DraftLimits, Sharing, Speculation
from routed_experts.layers.native.text_drafts import text_draft_functions
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.model_folder import ModelFolder
from routed_experts.speculation.draft_policy import DraftPolicy
from routed_experts.speculation.drafter import Drafter
from routed_experts.speculation.model_drafter import ModelDrafter
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import RolloutStore
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash


def check_speculation(*, offloads_experts: bool, placement: PlacementConfig | None) -> None:
    """Raise ConfigError for what drafts would change, or what has no verify step."""
    reason = None
    if offloads_experts:
        reason = "experts on the host run one layer at a time; leave kt_num_gpu_experts out"
    elif placement is not None and placement.capacity_limited:
        reason = "drafts would take the places of real tokens in experts with capacities; choose mode='replicas'"
    if reason is not None:
        raise ConfigError(f"not with speculation: {reason}, or leave speculative decoding out")


def find_draft(
    speculative: SpeculativeConfig,
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    args: ServerArgs,
    registry: BackendRegistry,
    *,
    has_placement: bool,
) -> FoundDraft:
    """Find the draft model; it runs on one device. Nothing is recorded of its experts."""
    if has_placement:
        text = "placed experts have no draft model in this version"
        raise ConfigError(f"not with speculation by {speculative.algorithm}: {text}; choose NGRAM, or no placement")
    if args.tp_size > 1 or args.ep_size > 1:
        text = f"tp_size={args.tp_size}, ep_size={args.ep_size}: a draft model runs on one device in this version"
        raise ConfigError(f"not with speculation by {speculative.algorithm}: {text}; choose NGRAM, or one device")
    return find_draft_model(
        speculative,
        source,
        config,
        context_length=resolve_context_length(args, config.context_length),
        choose_kernels=functools.partial(registry.choose, _without_capture(args)),
    )


def _without_capture(args: ServerArgs) -> ServerArgs:
    """The arguments of an engine that records nothing."""
    return dataclasses.replace(
        args,
        enable_return_routed_experts=False,
        enable_return_routed_experts_weights=False,
        routed_experts_weights_dtype="float32",  # the default: another one is refused without weights
    )


def create_speculation(
    speculative: SpeculativeConfig,
    new_core: Callable[[Speculation | None], EngineCore],
    buckets: Buckets,
    vocab_size: int,
    *,
    request: int,
    total: int,
) -> Speculation:
    """Create the drafter and its policy; the policy's table of costs is measured first, if it needs one."""
    limits = DraftLimits(num_drafts=speculative.num_drafts, vocab_size=vocab_size)
    costs = measure_costs(new_core, buckets, limits, request=request, total=total)
    policy = DraftPolicy(costs, adaptive=speculative.adaptive)
    sharing = Sharing(shares_answers=speculative.shares_answers, remembers_answers=speculative.remember)
    return Speculation(_create_drafter(speculative), policy, limits, costs=costs, sharing=sharing)


def _create_drafter(speculative: SpeculativeConfig) -> Drafter:
    """Create the drafter, and the store of answers that it may share."""
    if speculative.has_draft_model:
        return ModelDrafter()
    rule = CopyRule(
        min_window=speculative.min_window,
        max_window=speculative.max_window,
        counts=speculative.counts_continuations,
        max_factor=float(speculative.suffix_max_spec_factor),
        min_probability=float(speculative.suffix_min_token_prob),
    )
    if not speculative.shares_answers:
        return TextDrafter(rule, compiled=text_draft_functions())
    contexts = context_hash(rule)
    most_bytes = speculative.store_bytes // (2 if rule.counts else 1)  # of each of the two
    return TextDrafter(
        rule,
        store=RolloutStore(max_bytes=most_bytes, max_rollouts=speculative.suffix_max_cached_requests),
        texts=NamespaceTexts(contexts, max_bytes=most_bytes) if rule.counts else None,
        contexts=contexts,
        compiled=text_draft_functions(),
    )
