"""What lowlat touches in SGLang beyond the kernel-plugin contracts (``kernels.plugin_kernels.nvidia
.spec``, ``amd.spec`` and the objects that ``build`` returns). A test compares this list with what
the code does.
"""

from typing import NamedTuple

# The release that this list, and every test of the plugin, is about.
SGLANG_VERSION = "0.5.23"


class Touch(NamedTuple):
    """One thing that is read, called or written; `drop` says what would let us do without it."""

    symbol: str
    how: str
    why: str
    drop: str


SURFACE = (
    Touch(
        "sglang.__version__",
        "read",
        "another release may change what is listed here without changing the contract's version",
        "a contract that states the releases it holds for",
    ),
    Touch(
        "sglang.srt.environ.envs",
        "read",
        "the variables that decide the layout of weights and caches, in the guard's words",
        "a refusal of SGLang's that names the setting to change",
    ),
    Touch(
        "sglang.srt.kernel_plugins.nvidia.binding.features_in_use",
        "call",
        "to name each refused feature with its number and the setting that switches it off",
        "a refusal of SGLang's that names the setting to change",
    ),
    Touch(
        "sglang.srt.kernel_plugins.amd.binding.features_in_use",
        "call",
        "the same of the AMD contract",
        "a refusal of SGLang's that names the setting to change",
    ),
    Touch(
        "sglang.srt.kernel_plugins.amd.binding.device_isa",
        "call",
        "the part whose requirements the settings are compared with",
        "the machine code as an argument of config_disable_reasons",
    ),
    Touch(
        "sglang.srt.model_executor.forward_context.get_attn_backend",
        "call",
        "AMD: the running forward's metadata and caches",
        "a forward view in the AMD contract's Plan",
    ),
    Touch(
        "sglang.srt.runtime_context.get_spec",
        "read",
        "AMD: the rows of a request in a verify step",
        "tokens a request in the AMD contract's BuildContext",
    ),
    Touch(
        "sglang.srt.runtime_context.get_parallel",
        "call",
        "this rank's place and the CPU group that the ranks agree over",
        "ranks and group in BuildContext",
    ),
    Touch(
        "torch.distributed.all_gather_object",
        "call",
        "the ranks' ballots, over the CPU group",
        "an agreement that SGLang offers to a build",
    ),
    Touch(
        "torch.cuda.is_current_stream_capturing",
        "call",
        "what a captured graph reads is sealed while it is captured, and checked afterwards",
        "a call of SGLang's when a runner's graphs are all captured",
    ),
    Touch(
        "torch.cuda.current_device",
        "call",
        "the GPU that this rank's kernels are made on",
        "a device in BuildContext",
    ),
    Touch(
        "torch.cuda.current_stream",
        "call",
        "the stream that SGLang runs, or captures, the forward on",
        "a stream in the step",
    ),
    Touch(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "call",
        "what a draft's forward returns",
        "nothing: this is the contract's way",
    ),
    Touch(
        "step.view.metadata.core_attn_metadata: page_table, raw_out_loc, swa_page_indices;"
        " step.view.swa_out_cache_loc",
        "read",
        "a request's pages, and the full slot that each row writes; of a draft's block the slots"
        " that each row sees, and where its key goes",
        "nothing: this is the contract's way",
    ),
    Touch(
        "step.view.kv_pool.pool: get_index_k_with_scale_buffer, get_index_k_page_size,"
        " low_ratio_index_k_is_split, low_ratio_index_k_page8, get_index_k_fp4_payload_buffer,"
        " get_index_k_fp4_scale_buffer, get_attention_compress_states,"
        " get_indexer_compress_states, full_to_swa_index_mapping",
        "read",
        "the caches that the view has no names for, and where a token's window key lies; steps"
        " write the caches, as SGLang's own do",
        "names of the view's own for them",
    ),
    Touch(
        "model.model.engram_hasher: token_map, history",
        "write",
        "the tokens before a request's next row; a decode step moves its token in, as SGLang's"
        " own does (the binding's engram_history finds none on these models)",
        "the binding's engram_history",
    ),
    Touch(
        "model.named_parameters, named_buffers, named_modules, quant_method",
        "read",
        "the loaded tensors, and how their quantisation method left them",
        "layouts stated by the quantisation methods",
    ),
    Touch(
        "model.config.n_routed_experts, model.parameters",
        "read",
        "AMD: how many experts a copy has, and the device that it goes to",
        "copies made by SGLang",
    ),
    Touch(
        "model.logits_processor, model.lm_head",
        "call",
        "the head of a covered step is SGLang's own, hooks included",
        "nothing: this is the contract's way",
    ),
    Touch(
        "model.embed_tokens, model.lm_head, model.sample_from_anchor",
        "read",
        "of a draft: what SGLang attaches to it after the build, and whether its first row is"
        " sampled",
        "a call of SGLang's when both are attached",
    ),
    Touch(
        "model.layers[i].engram.embed.rows",
        "read",
        "the rows of an Engram table that this rank holds",
        "the shard's bounds in the model's configuration",
    ),
)
