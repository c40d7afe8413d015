"""Names of the servers and engines of SGLang, vLLM and sgl-jax, and what each does here: one table for all entrances.

* Served: a name of ours. It is a parameter or a flag, so it is not listed here.
* Translated: OTHER_NAMES, INVERSES and OTHER_VALUES lead to a parameter of ours.
* Accepted without effect: NO_EFFECT, with any value. No token, logprob or row depends on it. The log names all of
  them in one line.
* Refused: REFUSED, except with a value that asks for what this engine does anyway: None, False, something empty, or
  one of `own`. The reason says what to use instead.

Signatures do not spell these names out. Nine hundred keywords without effect would hide the fifty that have one, from
readers, editors and type checkers; `**kwargs` would hide them all. `core/keywords.py` looks a name up when a call has
one outside the signature, and `cli/flags.py` when a command line has one. So `help(Engine)` shows what works, and a
script that carries other names runs. docs/flags.md shows this table. The module is long because it is data."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Arity = Literal["switch", "value", "list"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameGroup:
    """Names with one reason. On a command line `switches` take no value, `values` one and `lists` several."""

    reason: str
    own: tuple[object, ...] = ()  # values of refused names that ask for what this engine does anyway
    switches: str = ""  # names, separated by white space
    values: str = ""
    lists: str = ""

    def names(self) -> dict[str, Arity]:
        """The names, and what each takes on a command line."""
        switches: dict[str, Arity] = dict.fromkeys(self.switches.split(), "switch")
        values: dict[str, Arity] = dict.fromkeys(self.values.split(), "value")
        lists: dict[str, Arity] = dict.fromkeys(self.lists.split(), "list")
        return switches | values | lists


OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(  # other spellings of our names
    {
        "model_path": ("model",),
        "tokenizer_path": ("tokenizer",),
        "context_length": ("max_model_len",),
        "tp_size": ("tensor_parallel_size", "tp"),
        "ep_size": ("expert_parallel_size", "ep"),
        "dp_size": ("data_parallel_size", "dp", "attn_dp_size", "attention_data_parallel_size"),
        "max_running_requests": ("max_num_seqs",),
        "max_queued_requests": ("max_num_queued_reqs",),
        "max_prefill_tokens": ("max_num_batched_tokens",),
        "page_size": ("block_size",),
        "mem_fraction_static": ("gpu_memory_utilization", "device_memory_utilization"),
        "disable_radix_cache": ("no_enable_prefix_caching",),
        "random_seed": ("seed",),
        "enable_return_routed_experts": ("return_routed_experts",),
        "deterministic": ("enable_deterministic_inference",),
        "dist_init_addr": ("nccl_init_addr",),
        "speculative_draft_model_path": ("speculative_draft_model",),
        "skip_tokenizer_init": ("tokens_only",),
    }
)
INVERSES: Mapping[str, str] = MappingProxyType({"enable_prefix_caching": "disable_radix_cache"})  # True is our False
SHORT_FLAGS: Mapping[str, str] = MappingProxyType(  # of a command line
    {
        "-tp": "tensor_parallel_size",
        "-dp": "data_parallel_size",
        "-ep": "enable_expert_parallel",
        "-pp": "pipeline_parallel_size",
        "-dcp": "decode_context_parallel_size",
        "-pcp": "prefill_context_parallel_size",
        "-dpn": "data_parallel_rank",
        "-dpr": "data_parallel_start_rank",
        "-dpl": "data_parallel_size_local",
        "-dpa": "data_parallel_address",
        "-dpp": "data_parallel_rpc_port",
        "-dpb": "data_parallel_backend",
        "-asc": "api_server_count",
        "-sc": "speculative_config",
        "-cc": "compilation_config",
        "-ac": "attention_config",
        "-q": "quantization",
        "-n": "nnodes",
        "-r": "node_rank",
        "-O": "optimization_level",
    }
)
OTHER_UNITS: Mapping[str, str] = MappingProxyType(  # flags whose values, where they match, count something else
    {"stream_interval": "[1-9][0-9]*"}  # tokens; ours has a point: seconds
)
_ATTENTION_KERNELS = """
    FLASHINFER FLASHMLA FLASH_ATTN FLASH_ATTN_MLA FLEX_ATTENTION TORCH_SDPA TRITON_ATTN TRITON_MLA XFORMERS aiter ascend
    cutlass_mla dual_chunk_flash_attn fa fa3 fa4 flashinfer flashmla flex_attention hybrid_linear_attn intel_amx
    intel_xpu nsa torch_native triton trtllm_mha trtllm_mla wave"""
_MOE_KERNELS = """
    aiter cutlass deep_gemm deepgemm epmoe flashinfer_cutedsl flashinfer_cutlass flashinfer_mxfp4 flashinfer_trtllm
    fused marlin triton triton_kernel triton_kernels"""
OTHER_VALUES: Mapping[str, Mapping[object, object]] = MappingProxyType(  # of names that are served
    {
        "dtype": {"half": "float16", "float": "float32"},
        "quantization": {"fp8": "fp8_block", "compressed-tensors": "auto", "mxfp4": "auto", None: "auto"},
        "kv_cache_dtype": {"fp8": "fp8_e4m3"},
        "device": {"gpu": "cuda"},
        "attention_backend": dict.fromkeys(_ATTENTION_KERNELS.split(), "auto"),
        "moe_backend": dict.fromkeys(_MOE_KERNELS.split(), "auto"),
        "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
        "chunked_prefill_size": {-1: None, "-1": None},  # no chunks of its own: as many tokens as a step takes
        "context_length": {-1: None, "-1": None, "auto": None},
        "load_format": {"safetensors": "auto"},
        "log_level": {"critical": "error", "fatal": "error", "warn": "warning", "trace": "debug", "notset": "debug"},
    }
)
NO_EFFECT: tuple[NameGroup, ...] = (
    NameGroup(
        reason="the model may call a tool wherever a request has tools",
        switches="enable_auto_tool_choice",
    ),
    NameGroup(
        reason="at most 20 top logprobs are returned a token; a request for more is refused",
        values="max_logprobs",
    ),
    NameGroup(
        reason="code of a checkpoint is never run; an architecture that is not built in is refused by its name",
        switches="trust_remote_code",
        values="code_revision",
    ),
    NameGroup(
        reason="programs are compiled by XLA for padded sizes: there are no graphs to capture and no eager mode",
        switches="""
            cudagraph_metrics debug_cuda_graph disable_cuda_graph disable_cuda_graph_padding disable_decode_cuda_graph
            disable_piecewise_cuda_graph disable_precompile disable_prefill_cuda_graph enable_cudagraph_gc
            enable_piecewise_cuda_graph enable_profile_cuda_graph enable_torch_compile enable_torch_compile_debug_mode
            enforce_eager enforce_piecewise_cuda_graph jit_monitor_verbose""",
        values="""
            compilation_config context_bucket cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config
            cuda_graph_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
            cuda_graph_prefill_max_context jit_monitor_mode max_cudagraph_capture_size max_seq_len optimization_level
            performance_mode piecewise_cuda_graph_compiler piecewise_cuda_graph_max_tokens torch_compile_max_bs""",
        lists="""
            cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_sizes cudagraph_capture_sizes
            piecewise_cuda_graph_tokens""",
    ),
    NameGroup(
        reason="`attention_backend`, `moe_backend` and the platform choose kernels: a matter of speed and rounding",
        switches="""
            disable_cascade_attn disable_chunked_prefix_cache disable_flashinfer_autotune
            disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion disable_topk_kernel
            dsa_use_pallas enable_amd_monokernel enable_deepep_moe enable_dsa_fused_indexer enable_ep_moe
            enable_flashinfer_autotune enable_flashinfer_mla enable_flashmla enable_fused_qk_norm_rope
            enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec enable_nvidia_megakernel
            enable_page_major_kv_layout enable_scattered_sconv enable_topk_kernel enable_waterfill
            enforce_shared_experts_fusion flashinfer_mla_disable_ragged mlx_enable_sampling monokernel
            triton_attention_reduce_in_fp32 use_fp64_gumbel use_replayssm use_sort_for_toppk_minp""",
        values="""
            all2all_backend attention_config bf16_gemm_backend c128_page_size decode_attention_backend deepep_config
            deepep_mode deepep_v2_mode dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend
            dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend fp4_gemm_backend
            fp4_gemm_runner_backend fp8_gemm_backend fp8_gemm_runner_backend fuseep_mode gdn_prefill_backend
            gdn_prefill_impl ir_op_priority kda_decode_backend kda_prefill_backend kernel_config linear_attn_backend
            linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend linear_backend
            linear_replayssm_cache_len mamba_backend mamba_config mamba_ssu_algorithm moe_a2a_backend moe_runner_backend
            monokernel_backend n_share_experts_fusion nsa_decode_backend nsa_prefill_backend prefill_attention_backend
            replayssm_buffer_len sampling_backend sparse_indexer_topk_backend triton_attention_num_kv_splits
            triton_attention_split_tile_size""",
        lists="flashinfer_autotune_skip_ops",
    ),
    NameGroup(
        reason="collectives are XLA's",
        switches="""
            disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill disable_custom_all_reduce
            disable_jax_allreduce_metadata disable_nccl_for_dp_synchronization enable_aiter_allreduce_fusion enable_dbo
            enable_flashinfer_allreduce_fusion enable_fused_moe_sum_all_reduce enable_mscclpp enable_nccl_comm_suspend
            enable_nccl_nvls enable_p2p_check enable_shm_tensor_arena enable_single_batch_overlap enable_symm_mem
            enable_torch_symm_mem enable_two_batch_overlap enforce_disable_flashinfer_allreduce_fusion pre_warm_nccl""",
        values="""
            boundary_reduction cpu_distributed_timeout_seconds dbo_decode_token_threshold dbo_prefill_token_threshold
            dcp_comm_backend distributed_timeout_seconds dp_sync_interval flashinfer_allreduce_fusion_backend
            mooncake_ib_device nccl_port tbo_token_distribution_threshold ubatch_size""",
    ),
    NameGroup(
        reason="how layers are divided follows from `tp_size`, `ep_size` and `dp_size`",
        switches="""
            dcp_q_replicate dcp_replicate_q_proj disable_attn_tp_gather enable_attn_tp_input_scattered
            enable_batch_sharded_sampling enable_cp_decode_attn_tp enable_cp_tp_group_sharing enable_dense_mlp_attn_tp
            enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_dsa_cache_layer_split
            enable_dynamic_chunking enable_ep_weight_filter enable_hc_sp enable_kv_cache_sharding enable_layernorm_sp
            enable_megamoe_for_layernorm_sp enable_sequence_parallel enable_shared_experts_attn_tp
            enable_tp_lm_head_all_to_all prefill_round_robin_balance""",
        values="""
            cp_kv_cache_interleave_size cp_strategy dcp_kv_cache_interleave_size dp_schedule_policy load_balance_method
            max_micro_batch_size moe_dense_tp_size nsa_prefill_cp_mode pp_async_batch_depth pp_max_micro_batch_size
            prefill_cp_mode shared_experts_tp_size""",
    ),
    NameGroup(
        reason="the scheduler is one thread; order and sizes of steps change no output",
        switches="""
            abort_on_priority_when_disabled async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
            disable_overlap_schedule disable_priority_preemption enable_chunked_prefill
            enable_engine_loop_run_forever_daemon enable_mixed_chunk enable_prefill_delayer enable_single_process
            long_prefill_token_threshold_adaptive schedule_low_priority_values_first scheduler_reserve_full_isl""",
        values="""
            default_priority_value load_snapshot_publish_interval load_watch_interval long_prefill_token_threshold
            max_long_partial_prefills max_num_partial_prefills min_free_slots_delay num_continuous_decode_steps
            num_lookahead_slots prefill_decode_interval prefill_decode_interval_min_bs prefill_delayer_max_delay_ms
            prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark
            prefill_max_requests prefill_schedule_interval priority_scheduling_preemption_threshold retraction_policy
            schedule_conservativeness scheduler_recv_interval watermark""",
        lists="prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets",
    ),
    NameGroup(
        reason="memory is planned before weights are read; requests that lose their pages are computed again",
        switches="""
            disable_hybrid_swa_memory enable_cumem_allocator enable_decoder_swa_bounded_replay
            enable_encoder_swa_bounded_replay enable_mamba_shared_prefix_checkpoint enable_recurrent_extra_buffer
            enable_unified_memory enable_unified_radix_tree kv_sharing_fast_prefill prefill_only_disable_kv_cache
            strip_thinking_cache swa_bounded_replay uses_mamba_radix_cache""",
        values="""
            hybrid_kvcache_ratio int8_mamba_ckpt_size mamba_block_size mamba_cache_mode mamba_full_memory_ratio
            mamba_max_states_per_path mamba_radix_cache_strategy mamba_scheduler_strategy mamba_track_interval
            max_mamba_cache_size max_recurrent_state_size prefix_cache_retention_interval prefix_caching_hash_algo
            prefix_match_unit radix_eviction_policy_config recurrent_state_memory_ratio recurrent_track_interval
            swa_full_tokens_ratio swa_prefix_tails swap_space""",
        lists="kv_cache_dtype_skip_layers",
    ),
    NameGroup(
        reason="this engine always has it",
        switches="""
            enable_cache_report enable_deterministic_sampling enable_fp32_lm_head enable_metrics
            enable_metrics_for_all_schedulers enable_prompt_tokens_details enable_request_id_headers enable_scale_out
            enable_server_load_tracking enable_sleep_mode enable_tokenizer_info_endpoint
            sleep_mode_offload_cudagraph""",
        values="sleep_mode_backend sse_keep_alive_interval",
    ),
    NameGroup(
        reason="the server is ready when everything is compiled; it has no warm-up of its own",
        switches="skip_server_warmup",
        values="startup_weight_load_mode warmups",
    ),
    NameGroup(
        reason="requests and their text are never written to the log; counts are at /metrics",
        switches="""
            aggregate_engine_logging disable_log_requests disable_log_stats disable_uvicorn_access_log enable_log_deltas
            enable_log_outputs enable_log_requests enable_logging_iteration_details enable_request_time_stats_logging
            log_error_stack log_requests show_time_cost""",
        values="""
            decode_log_interval disable_access_log_for_endpoints log_config_file log_level_http log_requests_format
            log_requests_level logging_config max_log_len uvicorn_log_level""",
        lists="log_requests_target uvicorn_access_log_exclude_prefixes",
    ),
    NameGroup(
        reason="diagnostics of the peer's own internals",
        switches="""
            debug_tensor_dump_inject enable_layerwise_nvtx_marker enable_layerwise_nvtx_tracing
            enable_mm_processor_stats enable_nan_detection enable_precision_tracer fail_on_environ_validation
            ray_workers_use_nsight""",
        values="""
            crash_dump_folder export_metrics_to_file_dir forward_pass_metrics_ipc_name forward_pass_metrics_worker_id
            gc_warning_threshold_secs kv_canary_real_data kv_canary_sweep_interval otlp_service_name trace_modules
            watchdog_config""",
        lists="collect_detailed_traces debug_tensor_dump_layers",
    ),
    NameGroup(
        reason="metrics have buckets and names of their own: see `--metrics-compat`",
        switches="collect_tokens_histogram enable_mfu_metrics kv_cache_metrics",
        values="""
            custom_histogram_buckets expert_balance_segment_counter expert_distribution_recorder_buffer_size
            kv_cache_metrics_sample per_request_spec_decode_metrics show_hidden_metrics_for_version
            tokenizer_metrics_custom_labels_header""",
        lists="""
            bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token generation_tokens_buckets
            prompt_tokens_buckets""",
    ),
    NameGroup(
        reason="processes, threads and garbage collection of the peer",
        switches="""
            disable_frontend_multiprocessing disable_outlines_disk_cache disable_tokenizer_batch_decode
            enable_dynamic_batch_tokenizer enable_http_worker_reuseport enable_tokenizer_batch_encode numa_bind
            sleep_on_idle""",
        values="""
            api_server_count batch_notify_size data_parallel_backend detokenizer_worker_num distributed_executor_backend
            dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout engine_info_bootstrap_port
            file_storage_path gated_launch_port grpc_response_timeout_secs grpc_worker_threads h11_max_header_count
            h11_max_incomplete_event_size http2_initial_connection_window_size http2_max_concurrent_streams
            max_parallel_loading_workers renderer_num_workers soft_watchdog_timeout tokenizer_backend
            tokenizer_worker_num""",
        lists="gc_threshold numa_bind_cpus numa_bind_nodes numa_node sidecar_args",
    ),
    NameGroup(
        reason="how the files of a checkpoint are read changes no weight",
        switches="""
            use_tqdm_on_load weight_loader_disable_mmap weight_loader_drop_cache_after_load
            weight_loader_prefetch_checkpoints""",
        values="""
            ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy
            safetensors_prefetch_block_size safetensors_prefetch_num_threads weight_cache_socket weight_cache_timeout
            weight_loader_prefetch_num_threads""",
    ),
    NameGroup(
        reason="models take text: images, audio and video are refused in a request",
        switches="""
            disable_fast_image_processor disable_mm_preprocessor_cache enable_adaptive_dispatch_to_encoder
            enable_broadcast_mm_inputs_process enable_mm_global_cache enable_multimodal_encoder_data_parallel
            enable_precise_embedding_interpolation enable_prefix_mm_cache interleave_mm_strings
            keep_mm_feature_on_device language_model_only language_only mm_device_do_normalize mm_enable_dp_encoder
            mm_encoder_only skip_mm_profiling trust_mm_content_hashes trust_request_mm_kwargs""",
        values="""
            allowed_local_media_path asr_max_buffer_seconds asr_max_concurrent_sessions ec_manager_config
            encoder_bootstrap_port encoder_transfer_backend image_processor_backend limit_mm_data_per_request
            limit_mm_per_prompt media_io_kwargs media_url_max_file_size_mb mm_attention_backend mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
            mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_feature_transport mm_global_cache_backend
            mm_hasher_algorithm mm_io_worker_num mm_ipc_gpu_memory_gb mm_max_concurrent_calls mm_per_request_timeout
            mm_preprocess_cache_size_mb mm_process_config mm_processor_cache_gb mm_processor_cache_type
            mm_processor_device mm_processor_kwargs mm_processor_worker_num mm_shm_cache_max_object_size_mb
            mm_tensor_ipc video_pruning_method video_pruning_rate""",
        lists="allowed_media_domains encoder_register_urls encoder_urls",
    ),
    NameGroup(
        reason="it refines LoRA, and adapters are refused",
        switches="""
            enable_lora_bias enable_lora_overlap_loading enable_mixed_moe_lora_format enable_moe_shared_loras
            enable_tower_connector_lora experts_shared_outer_loras fully_sharded_loras lora_strict_loading
            lora_use_virtual_experts specialize_active_lora""",
        values="""
            lora_backend lora_drain_wait_threshold lora_dtype lora_eviction_policy lora_extra_vocab_size lora_scaling
            max_cpu_loras max_loaded_loras max_lora_chunk_size max_lora_cls_labels max_lora_rank max_loras
            max_loras_per_batch""",
        lists="lora_target_modules",
    ),
    NameGroup(
        reason="it refines prefill/decode disaggregation, which is refused",
        switches="""
            disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
            disaggregation_enable_chunk_prefill_transfer disaggregation_enable_d2h disaggregation_enable_kv_checksum
            disaggregation_use_raiden""",
        values="""
            disaggregation_ack_timeout_seconds disaggregation_bootstrap_port disaggregation_bootstrap_timeout_seconds
            disaggregation_bootstrap_url disaggregation_channel_number disaggregation_d2h_max_tokens
            disaggregation_d2h_pool_size disaggregation_decode_allocation_policy disaggregation_decode_dp
            disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
            disaggregation_decode_polling_interval disaggregation_decode_retraction_backup disaggregation_decode_tp
            disaggregation_decode_watchdog_seconds disaggregation_host_ip disaggregation_ib_device
            disaggregation_max_inflight_transfers disaggregation_num_reserved_decode_tokens
            disaggregation_orphan_reaper_interval_seconds disaggregation_prefill_pp disaggregation_pull_timeout_seconds
            disaggregation_shared_secret disaggregation_side_channel_port disaggregation_transfer_backend
            disaggregation_transfer_port num_reserved_decode_tokens optimistic_prefill_attempts pd_decode_max_tokens
            pd_decode_mem_fraction pd_num_decode pd_num_prefill pd_prefill_ep_size pd_prefill_max_tokens
            pd_prefill_mem_fraction pd_prefill_tp_size pdmux_config_path sm_group_num""",
    ),
    NameGroup(
        reason="it refines a cache on the host or elsewhere, which is refused",
        switches="enable_linker_mla_dedup",
        values="""
            flexkv_config_file hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend
            hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend_extra_config
            hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
            hicache_storage_prefetch_retry_poll_interval hicache_write_policy hicache_write_through_threshold
            hierarchical_sparse_attention_extra_config hisparse_config kv_offloading_backend lmcache_config_file
            unified_cache_external_linker_backend unified_cache_external_linker_config""",
    ),
    NameGroup(
        reason="it refines EPLB, which has a config of its own: `--placement`",
        switches="eplb_log_balancedness",
        values="""
            elastic_ep_initial_size elastic_ep_join_rank_offset elastic_ep_max_dp_size elastic_ep_scale_timeout
            ep_dispatch_algorithm ep_join_rank_offset eplb_algorithm eplb_config
            eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
            eplb_step_interval eplb_window_size expert_distribution_recorder_mode max_ep_size""",
    ),
    NameGroup(
        reason="it refines offloading of weights, which has a config of its own: `--kt-num-gpu-experts`",
        values="""
            offload_mode offload_num_in_group offload_prefetch_step paged_experts_num_resident ple_offload_backend
            ple_offload_dir""",
        lists="cpu_offload_params offload_params",
    ),
    NameGroup(
        reason="drafts change speed alone, never an output",
        switches="""
            enable_multi_layer_eagle speculative_dspark_align_verify_tokens_to_graph_tier
            speculative_enable_w4a4_mxfp4_megamoe speculative_use_block_verification
            speculative_use_rejection_sampling""",
        values="""
            decoupled_spec_bind_endpoint decoupled_spec_rank speculative_adaptive_config speculative_attention_mode
            speculative_boundary_reduction speculative_dflash_block_size speculative_domino_candidate_pool_size
            speculative_draft_attention_backend speculative_draft_kv_cache_dtype speculative_draft_sink_size
            speculative_draft_window_size speculative_dsa_topk_backend speculative_dspark_block_size
            speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path speculative_moe_a2a_backend
            speculative_moe_runner_backend speculative_ngram_external_corpus_max_tokens
            speculative_ngram_external_sam_budget speculative_token_map""",
        lists="decoupled_spec_connect_endpoints",
    ),
    NameGroup(
        reason="it refines a feature that is refused",
        switches="""
            allow_credentials allow_deprecated_quantization cohere_is_reasoning_model dllm_fdfo
            enable_flash_late_interaction enable_mis enable_offline_docs enable_ssl_refresh enable_w4a4_mxfp4_megamoe
            guided_decoding_disable_fallback remote_instance_weight_loader_start_seed_via_transfer_engine
            watermark_default_enabled watermark_enforce_all""",
        values="""
            anthropic_disabled_thinking_effort aux_hidden_state_capture cohere_format data_parallel_rpc_port
            data_parallel_supervisor_port deepep_dispatcher_output_dtype dllm_algorithm_config
            dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
            ds_channel_config_path ds_heavy_channel_num ds_heavy_channel_type ds_heavy_token_num
            ds_sparse_decode_threshold fault_tolerance_config fingerprint_value flashinfer_a2a_dispatch_type
            flashinfer_mxfp4_moe_precision grpc_http_sidecar_port io_processor_plugin logits_processor_pattern
            mamba_cache_philox_rounds modelexpress_config modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
            modelopt_export_path multi_item_scoring_delimiter prefill_kv_cache_dequant_dtype qsa_indexer_dtype
            quantization_param_path remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port sampling_mask_max_tokens smg_http_sidecar_port
            ssl_cert_reqs ssl_ciphers ssl_keyfile_password watermark_context_window watermark_key watermark_key_b
            watermark_max_probability watermark_mixing_probability""",
        lists="""
            allowed_headers allowed_methods remote_instance_weight_loader_send_weights_group_ports
            return_aux_hidden_state_layer_ids sleep_preserve_parameter_names tokenizer_metrics_allowed_custom_labels""",
    ),
)
REFUSED: tuple[NameGroup, ...] = (
    NameGroup(
        reason="quantised checkpoints are recognised by their config; leave it out, or give quantization",
        own=("auto",),
        switches="enable_quant_communications quantize_and_serve",
        values="""
            dtype_config modelopt_quant quantization_config quantization_config_path rl_quant_profile
            speculative_draft_model_quantization torchao_config""",
    ),
    NameGroup(
        reason="scales of keys are the checkpoint's, or 1, and kernels choose the precision of attention; leave it out",
        own=("auto",),
        switches="calculate_kv_scales",
        values="override_attention_dtype",
    ),
    NameGroup(
        reason="recurrent states are kept as the model defines them; leave it out",
        own=("auto",),
        switches="""
            enable_deepseek_v4_fp4_indexer enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding""",
        values="mamba_cache_dtype mamba_ssm_cache_dtype mamba_ssm_dtype",
    ),
    NameGroup(
        reason="the precision of products is JAX's: set JAX_DEFAULT_MATMUL_PRECISION",
        switches="enable_tf32_matmul",
    ),
    NameGroup(
        reason="adapters are not served; merge the adapter into the checkpoint",
        switches="enable_lora enable_static_lora",
        values="default_mm_loras lora_paths uno_lora_path",
        lists="lora_modules",
    ),
    NameGroup(
        reason="one engine prefills and decodes; for several use serve --num-replicas",
        own=("null", ""),
        switches="enable_pd_role_switch enable_pdmux",
        values="disaggregation_mode ec_transfer_config kv_transfer_config pd_disaggregation pdlb_url",
    ),
    NameGroup(
        reason="layers are not divided into stages; give the devices to --tp-size",
        own=(1,),
        values="pipeline_parallel_size pp_size",
    ),
    NameGroup(
        reason="sequences are not divided; give the devices to --tp-size",
        own=(1,),
        switches="enable_nsa_prefill_context_parallel enable_prefill_context_parallel enable_prefill_cp",
        values="""
            attention_context_parallel_size attn_cp_size dcp_size decode_context_parallel_size
            prefill_context_parallel_size""",
    ),
    NameGroup(
        reason="give --ep-size and --dp-size, or serve --num-replicas for copies of the model",
        own=(1,),
        values="dwdp_size moe_data_parallel_size moe_dp_size",
    ),
    NameGroup(
        reason="data ranks of an engine are --dp-size, copies serve --num-replicas, a process --node-rank",
        switches="""
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb headless""",
        values="""
            data_parallel_address data_parallel_rank data_parallel_size_local data_parallel_start_rank""",
    ),
    NameGroup(
        reason="processes of one model are a group: --nnodes, --node-rank and --dist-init-addr HOST:PORT",
        own=(29501, "127.0.0.1"),
        values="master_addr master_port",
    ),
    NameGroup(
        reason="a fleet of Ray is serve --num-replicas or --ray-address",
        switches="use_ray",
    ),
    NameGroup(
        reason="devices are chosen outside: set CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS",
        own=(0, 1),
        values="base_gpu_id gpu_id_step",
        lists="device_ids device_indexes",
    ),
    NameGroup(
        reason="the group has a fixed size; start it again with another --tp-size",
        switches="enable_elastic_ep enable_elastic_expert_backup enable_fault_tolerance",
        values="elastic_ep_backend elastic_ep_join_mode ep_join_mode",
    ),
    NameGroup(
        reason="experts are placed by --placement FILE.npz, and rebalanced with --rebalance-every",
        own=("trivial", "linear", 0),
        switches="enable_eplb",
        values="""
            ep_num_redundant_experts expert_placement_strategy init_expert_location num_redundant_experts""",
    ),
    NameGroup(
        reason="experts on the host are --kt-num-gpu-experts; other weights stay on the device",
        own=(0, -1, "auto"),
        switches="enable_paged_experts ple_offload_embedding",
        values="cpu_offload_gb offload_backend offload_group_size",
    ),
    NameGroup(
        reason="cached prefixes are kept on the device; give it more with --mem-fraction-static",
        own=("disable",),
        switches="""
            enable_flexkv enable_hicache enable_hierarchical_cache enable_hisparse enable_lmcache
            enable_unified_cache_external_linker""",
        values="hicache_storage hicache_storage_backend kv_offloading_size radix_cache_backend",
    ),
    NameGroup(
        reason="the least recently used prefix is evicted",
        own=("lru",),
        values="radix_eviction_policy",
    ),
    NameGroup(
        reason="requests start in the order of arrival; lpm and fcfs mean the same here",
        own=("fcfs", "lpm"),
        switches="enable_priority_scheduling",
        values="schedule_policy scheduler_cls scheduling_policy",
    ),
    NameGroup(
        reason="pages are counted by --max-total-tokens (tokens) or --mem-fraction-static",
        values="kv_cache_memory_bytes num_gpu_blocks_override",
    ),
    NameGroup(
        reason="the limits are --max-queued-requests and --max-running-requests",
        values="max_num_active_seqs max_num_queued_tokens",
    ),
    NameGroup(
        reason="tokens of a step are --max-prefill-tokens",
        values="max_num_scheduled_tokens",
    ),
    NameGroup(
        reason="the algorithms are those of --speculative-algorithm",
        own=("null",),
        values="decoupled_spec_role spec_trace_dir speculative_ngram_external_corpus_path",
    ),
    NameGroup(
        reason='give --speculative-config \'{"method": ..., "num_speculative_tokens": ...}\'',
        values="spec_method spec_model spec_tokens",
    ),
    NameGroup(
        reason="a draft model is a folder: --speculative-draft-model-path",
        own=("auto",),
        values="speculative_draft_load_format speculative_draft_model_revision",
    ),
    NameGroup(
        reason="a model's config.json says what it is; write a folder with another one",
        own=("auto", "hf", "{}"),
        switches="disable_sliding_window",
        values="""
            config_format hf_config_path hf_overrides json_model_override_args model_class_overrides model_config_parser
            model_layer_nums model_weights override_pooler_config rope_scaling rope_theta""",
    ),
    NameGroup(
        reason="models are those of docs/models.md, in this package's code",
        own=("auto", "sglang", "vllm"),
        values="model_impl",
    ),
    NameGroup(
        reason="text is generated; embeddings, scores of classes and encoders are not served",
        own=("auto", "none", "generate"),
        switches="""
            enable_mm_embeds enable_multimodal enable_prompt_embeds encoder_only is_embedding multimodal""",
        values="convert pooler_config runner task",
    ),
    NameGroup(
        reason="the fast tokenizer of the folder is used: tokenizer.json",
        own=("auto", "hf"),
        values="tokenizer_mode tokenizer_revision",
    ),
    NameGroup(
        reason="the cache of downloads and the key are the hub's: set HF_HOME and HF_TOKEN",
        values="download_dir hf_token",
    ),
    NameGroup(
        reason="weights are read from safetensors of the folder",
        switches="checkpoint_engine_wait_weights_before_ready delete_ckpt_after_loading",
        values="decrypted_config_file decrypted_draft_config_file model_checksum",
        lists="custom_weight_loader",
    ),
    NameGroup(
        reason="weights are read from the folder by each process",
        own=("off",),
        values="weight_cache_mode",
    ),
    NameGroup(
        reason="new weights come by /update_weights_from_disk or Engine.update_weights",
        switches="enable_draft_weights_cpu_backup enable_weights_cpu_backup",
        values="weight_transfer_config worker_extension_cls",
    ),
    NameGroup(
        reason="the engine has no workers to replace; extend it in Python",
        own=("auto", "{}"),
        switches="enable_custom_logit_processor",
        values="additional_config custom_sigquit_handler stat_loggers worker_cls",
        lists="forward_hooks logits_processors middleware",
    ),
    NameGroup(
        reason="this engine records routed experts; it returns no other inner value",
        switches="""
            enable_return_aux_hidden_states enable_return_hidden_states enable_return_indexer_topk
            return_sampling_mask""",
        values="aux_output_config return_hidden_states_mode",
    ),
    NameGroup(
        reason="the text of an answer is the model's alone",
        switches="enable_watermark",
        values="watermark_config",
    ),
    NameGroup(
        reason="the model is an autoregressive decoder",
        switches="enable_double_sparsity",
        values="diffusion_config dllm_algorithm engram_config",
    ),
    NameGroup(
        reason="bitwise equal rows in any batch are --deterministic, and a trainer's are Engine.score",
        switches="enable_trace_replay",
        values="rl_on_policy_target",
    ),
    NameGroup(
        reason="counts of routing are Engine.routing_stats, /v1/routing/stats and --expert-metrics",
        own=("off",),
        switches="""
            enable_expert_balance_debug enable_expert_distribution_metrics enable_expert_distribution_recorder""",
        values="""
            expert_balance_output_file expert_balancedness_report_mode expert_distribution_recorder_output_file""",
    ),
    NameGroup(
        reason="sampling values are those of the request, else OpenAI's: temperature 1, top_p 1",
        own=("openai", "vllm", "{}"),
        values="generation_config override_generation_config preferred_sampling_params sampling_defaults",
    ),
    NameGroup(
        reason="a prompt that is too long is an error",
        switches="allow_auto_truncate",
    ),
    NameGroup(
        reason="a request asks for it: stream_options, return_token_ids",
        switches="return_input_ids return_output_ids stream_response_default_include_usage",
    ),
    NameGroup(
        reason="the chat template is the folder's: tokenizer_config.json or chat_template.jinja",
        own=("auto", "string", "assistant"),
        switches="trust_request_chat_template",
        values="""
            chat_template chat_template_content_format completion_template hf_chat_template_name response_role""",
    ),
    NameGroup(
        reason="a request gives it: chat_template_kwargs",
        switches="enable_strict_thinking",
        values="default_chat_template_kwargs reasoning_effort_map",
    ),
    NameGroup(
        reason="the parts of answers are found by the model's family",
        own=("auto",),
        switches="exclude_tools_when_tool_choice_none",
        values="reasoning_config reasoning_parser_plugin tool_parser_plugin tool_strict_level",
    ),
    NameGroup(
        reason="structured output has one backend",
        own=("auto", "llguidance", "guidance", "none", "{}"),
        switches="""
            constrained_json_disable_any_whitespace guided_decoding_disable_additional_properties
            guided_decoding_disable_any_whitespace""",
        values="""
            constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern grammar_backend
            guided_decoding_backend structured_outputs_config""",
    ),
    NameGroup(
        reason="tools are run by the client",
        values="tool_server",
    ),
    NameGroup(
        reason="a client sends the whole conversation",
        switches="enable_response_store enable_session_radix_cache enable_streaming_session",
    ),
    NameGroup(
        reason="the server speaks HTTP/1.1 on a port; a proxy adds TLS, other protocols, hidden routes",
        own=("", "/", "demo"),
        switches="disable_fastapi_docs enable_http2 grpc grpc_mode smg_grpc_mode",
        values="grpc_port sidecar ssl_ca_certs ssl_certfile ssl_keyfile uds",
    ),
    NameGroup(
        reason="one origin is --cors-origin URL",
        lists="allowed_origins",
    ),
    NameGroup(
        reason="no fingerprint is sent",
        own=("none",),
        values="fingerprint_mode",
    ),
    NameGroup(
        reason="metrics are at /metrics, without labels of a deployment; no traces or events are sent",
        own=("localhost:4317",),
        switches="enable_forward_pass_metrics enable_trace export_metrics_to_file",
        values="extra_metric_labels kv_events_config load_publish_endpoint otlp_traces_endpoint",
    ),
    NameGroup(
        reason="profile with jax.profiler",
        values="profiler_config",
    ),
    NameGroup(
        reason="tensors are not written; compare logprobs and rows",
        own=("none",),
        values="""
            debug_tensor_dump_input_file debug_tensor_dump_output_folder kv_canary msprobe_dump_config""",
    ),
)
SERVER_SETTINGS = NameGroup(
    reason="a setting of `serve`: in a process without a server it has no effect",
    switches="""
        enable_dp_attention enable_force_include_usage enable_memory_saver enable_per_request_metrics
        return_tokens_as_token_ids""",
    values="""
        host port served_model_name log_level root_path fastapi_root_path stream_interval shutdown_timeout config
        tool_call_parser reasoning_parser""",
    lists="api_key admin_api_key",
)
IN_PROCESS: tuple[NameGroup, ...] = (  # flags that have another form in Python
    NameGroup(
        reason="streams of `generate` are cumulative; those of `stream` yield what is new",
        switches="incremental_streaming_output stream_output",
    ),
    NameGroup(reason="give ep_size=tp_size, with tp_size devices", switches="enable_expert_parallel"),
    NameGroup(
        reason="give experts=ExpertOffloadConfig(...), which has this field",
        values="""
            kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
            kt_max_deferred_experts_per_token kt_gpu_prefill_token_threshold""",
    ),
    NameGroup(reason="give speculative=SpeculativeConfig.from_vllm({...})", values="speculative_config"),
    NameGroup(reason="give its fields: Engine(**dataclasses.asdict(server_args))", values="server_args"),
)
OTHER_REQUEST_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(  # keywords of `generate`
    {"data_parallel_rank": ("routed_dp_rank",), "extra_key": ("cache_salt",)}
)
REQUEST_NO_EFFECT = NameGroup(
    reason="requests start in the order of arrival; no progress bar is drawn; nothing is traced",
    values="priority use_tqdm external_trace_header kv_hints session_id",
)
REQUEST_REFUSED: tuple[NameGroup, ...] = (
    NameGroup(
        reason="models take text",
        values="""
            image_data audio_data video_data mm_hashes mm_content_hashes multi_modal_data multi_modal_uuids
            mm_processor_kwargs token_type_ids encoder_prompt decoder_prompt""",
    ),
    NameGroup(reason="give text or token ids", values="prompt_embeds input_embeds"),
    NameGroup(reason="adapters are not served; merge the adapter into the checkpoint", values="lora_path lora_request"),
    NameGroup(reason="code that requests send is never run; give logit_bias", values="custom_logit_processor"),
    NameGroup(reason="this engine records routed experts, and no other inner value", values="return_hidden_states"),
    NameGroup(reason="send the whole conversation; its prefix is cached", values="session_params"),
    NameGroup(reason="tokenise the prompt yourself and give token ids", values="tokenization_kwargs"),
    NameGroup(
        reason="one engine prefills and decodes",
        values="bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank",
    ),
    NameGroup(reason="the answer is returned as the model writes it", values="require_reasoning"),
)
