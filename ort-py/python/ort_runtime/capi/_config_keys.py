"""Configuration entries: the keys that are known, to find misspelt ones.

onnxruntime accepts any key in silence. So does this package, since providers have their own keys;
but a key that is almost a known one is most likely a mistake, and is warned about.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__: list[str] = []

_OPTIONS = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "execution_mode",
    "graph_optimization_level",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "use_deterministic_compute",
    "use_per_session_threads",
)

_SESSION = (
    "allow_released_opsets_only",
    "collect_node_memory_stats_to_file",
    "compile_only",
    "debug_layout_transformation",
    "disable_aot_function_inlining",
    "disable_cpu_ep_fallback",
    "disable_double_qdq_remover",
    "disable_model_compile",
    "disable_prepacking",
    "disable_qdq_constant_folding",
    "disable_quant_qdq",
    "dynamic_block_base",
    "enable_dq_matmulnbits_fusion",
    "enable_quant_qdq_cleanup",
    "fail_on_suboptimal_compiled_model",
    "force_spinning_stop",
    "function_expansion_byte_limit",
    "function_expansion_node_limit",
    "gqa_value_layout",
    "graph_optimizations_loop_level",
    "inter_op.allow_spinning",
    "inter_op.spin_backoff_max",
    "inter_op.spin_duration_us",
    "intra_op.allow_spinning",
    "intra_op.spin_backoff_max",
    "intra_op.spin_duration_us",
    "intra_op_thread_affinities",
    "layer_assignment_settings",
    "load_model_format",
    "max_shape_override",
    "model_external_initializers_file_folder_path",
    "name_based_layer_assignment",
    "node_partition_config_file",
    "optimized_model_external_initializers_file_name",
    "optimized_model_external_initializers_min_size_in_bytes",
    "prepack.enable_parallel",
    "qdq_matmulnbits_accuracy_level",
    "qdq_matmulnbits_block_size",
    "qdqisint8allowed",
    "record_ep_graph_assignment_info",
    "resource_cuda_partitioning_settings",
    "save_external_prepacked_constant_initializers",
    "save_model_format",
    "set_denormal_as_zero",
    "strict_shape_type_inference",
    "strict_workspace_verification",
    "use_device_allocator_for_initializers",
    "use_env_allocators",
    "use_external_initializer_file_buffers_directly",
    "use_ort_model_bytes_directly",
    "use_ort_model_bytes_for_initializers",
    "x64quantprecision",
    *_OPTIONS,
)

_OPTIMIZATION = (
    "constant_folding_max_output_size_in_bytes",
    "disable_specified_optimizers",
    "enable_cast_chain_elimination",
    "enable_gelu_approximation",
    "enable_memory_probe_recompute_config",
    "memory_optimizer_config",
    "minimal_build_optimizations",
)

_OTHER = (
    "arena_extend_strategy",
    "ep.context_enable",
    "ep.context_file_path",
    "ep.context_embed_mode",
    "ep.enable_weightless",
    "initial_chunk_size_bytes",
    "initial_growth_chunk_size_bytes",
    "load_threads",
    "max_dead_bytes_per_chunk",
    "max_mem",
    "max_power_of_two_extend_bytes",
    "memory_limit",
    "mlas.disable_kleidiai",
    "mlas.qnbit.force_fp32",
    "mlas.use_lut_gemm",
)

KNOWN = frozenset(
    {
        *(f"session.{name}" for name in _SESSION),
        *(f"optimization.{name}" for name in _OPTIMIZATION),
        *_OTHER,
    }
)


def misspelt(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the keys that are almost known ones, each with the known one."""
    unknown = [key for key in keys if key not in KNOWN]
    if not unknown:
        return []
    from difflib import get_close_matches  # slow to import, and rarely needed

    pairs = []
    for key in unknown:
        if near := get_close_matches(key, KNOWN, 1, 0.9):
            pairs.append((key, near[0]))
    return pairs
