"""``lowlat/kernels.h`` by ctypes: the structs, and a group of ranks in this process.

The library is ``LOWLAT_KERNELS`` or the installed one, ``lowlat/_lib/liblowlat_kernels.so``.
"""

import ctypes as ct
import importlib.util
import os
from pathlib import Path

import numpy as np

ABI_VERSION = 1
MAX_DIMS, MAX_LAYERS, MAX_WIDTHS, MAX_STAGES, MAX_ENGRAMS = 6, 64, 32, 4, 4
PEER_HANDLE_BYTES = 128
DECODE, VERIFY, EXTEND = 0, 1, 2
POOL = 1
# By lowlat_dtype: u8, i32, i64, f32, bf16 bits, e4m3, ue8m0, fp4 pairs.
DTYPES = [np.uint8, np.int32, np.int64, np.float32, np.uint16, np.uint8, np.uint8, np.uint8]
SYNCHRONIZE_BUDGET_NS = 60_000_000_000

i32, i64, u32, u64, f32, f64 = (
    ct.c_int32,
    ct.c_int64,
    ct.c_uint32,
    ct.c_uint64,
    ct.c_float,
    ct.c_double,
)


def same_type(names, kind):
    return [(name, kind) for name in names.split()]


class Struct(ct.Structure):
    """With struct_bytes set. Arrays given for pointer fields are kept as long as the struct."""

    def __init__(self, **fields):
        super().__init__()
        if self._fields_[0][0] == "struct_bytes":
            self.struct_bytes = ct.sizeof(self)
        self.kept = []
        kinds = dict(self._fields_)
        for name, value in fields.items():
            if isinstance(value, np.ndarray) and kinds[name] is ct.c_void_p:
                self.kept.append(value)
                value = value.ctypes.data
            setattr(self, name, value)


class Tensor(Struct):
    _fields_ = [
        *same_type("struct_bytes dtype layout ndim", u32),
        ("shape", i64 * MAX_DIMS),
        ("stride", i64 * MAX_DIMS),
        ("data", ct.c_void_p),
    ]


class TensorSpec(Struct):
    _fields_ = [
        *same_type("struct_bytes dtype layout role ndim", u32),
        ("shard_dim", i32),
        ("shape", i64 * MAX_DIMS),
        ("name", ct.c_char_p),
    ]


class Layer(ct.Structure):
    _fields_ = same_type("ratio kv_source index_source candidate_source engram hash_gate", i32)


class ModelConfig(Struct):
    _fields_ = [
        *same_type("struct_bytes kind", u32),
        *same_type("hidden num_layers vocab", i32),
        *same_type("num_heads head_dim rope_dim q_lora o_groups o_lora window", i32),
        *same_type("num_experts experts_per_token moe_intermediate", i32),
        *same_type("index_heads index_dim index_topk candidate_layer", i32),
        *same_type("candidate_blocks candidate_block_size scale_block sinkhorn_iters", i32),
        *same_type("norm_eps hc_eps swiglu_limit routed_scaling", f32),
        *same_type("rope_theta compress_rope_theta", f64),
        *same_type("yarn_factor yarn_beta_fast yarn_beta_slow yarn_original_positions", f64),
        ("max_positions", i64),
        ("layers", Layer * MAX_LAYERS),
        *same_type("num_engrams engram_head_dim engram_pad_token image_token", i32),
        ("engram_primes", i64 * 8 * 3 * MAX_ENGRAMS),
        ("engram_multipliers", i64 * 4 * MAX_ENGRAMS),
        *same_type("num_draft_stages draft_block draft_mask_token markov_rank", i32),
        *same_type("draft_experts draft_experts_per_token", i32),
        ("draft_target_layers", i32 * MAX_STAGES),
        *same_type("tp_rank tp_size num_widths max_batch max_rows", i32),
        ("widths", i32 * MAX_WIDTHS),
        *same_type("page_size num_pages state_ring", i32),
        ("wait_budget_ns", u64),
    ]


class Step(Struct):
    _fields_ = [
        *same_type("struct_bytes mode", u32),
        *same_type("num_rows batch_size tokens_per_request page_table_stride", i32),
        *same_type("token_ids positions request_idx slots page_table", ct.c_void_p),
        *same_type("history state_slots", ct.c_void_p),
        *same_type("num_logit_rows reserved", i32),
        *same_type("logit_rows logits argmax", ct.c_void_p),
    ]


class Draft(Struct):
    _fields_ = [
        ("struct_bytes", u32),
        ("num_inject_rows", i32),
        *same_type("inject_slots inject_positions", ct.c_void_p),
        *same_type("batch_size page_table_stride", i32),
        *same_type("anchors prefixes slots page_table temperature", ct.c_void_p),
        *same_type("noise_row noise_offset", ct.c_void_p),
        ("noise_key", u64),
        *same_type("draft_tokens draft_logits", ct.c_void_p),
    ]


class Accept(Struct):
    _fields_ = [
        ("struct_bytes", u32),
        *same_type("batch_size num_drafts vocab", i32),
        *same_type("draft_tokens target_logits draft_logits temperature coins", ct.c_void_p),
        *same_type("accepted next_tokens", ct.c_void_p),
    ]


class PeerHandle(ct.Structure):
    _fields_ = [("bytes", ct.c_uint8 * PEER_HANDLE_BYTES)]


def find_library():
    """The kernel library, or None."""
    if "LOWLAT_KERNELS" in os.environ:
        return Path(os.environ["LOWLAT_KERNELS"])
    spec = importlib.util.find_spec("lowlat")
    for folder in spec.submodule_search_locations if spec else ():
        path = Path(folder) / "_lib" / "liblowlat_kernels.so"
        if path.exists():
            return path
    return None


def installed_kernels():
    """The same of an installed lowlat, which has one."""
    path = find_library()
    assert path is not None, "lowlat is here without its kernel library"
    return path


def config_struct(config, tp_rank, tp_size):
    """A ModelConfig from a dict of its fields; lists and nested lists become arrays."""
    out = ModelConfig(tp_rank=tp_rank, tp_size=tp_size)
    for name, value in config.items():
        if name == "layers":
            for idx, layer in enumerate(value):
                out.layers[idx] = Layer(**layer)
        elif isinstance(value, (list, np.ndarray)):
            target = getattr(out, name)
            for idx in np.ndindex(np.shape(value)):
                place = target
                for i in idx[:-1]:
                    place = place[i]
                place[idx[-1]] = int(np.asarray(value)[idx])
        else:
            setattr(out, name, value)
    return out


class Group:
    """The ranks of one model. `shard(spec, tp_rank)` gives the array to bind for a weight."""

    platform = b"scalar"

    def place(self, array, rank):
        """The array where the rank's kernels reach it."""
        return array

    def __init__(self, path, config, tp_size, shard):
        self.lib = ct.CDLL(str(path))
        self.lib.lowlat_last_error.restype = ct.c_char_p
        assert self.lib.lowlat_kernels_abi_version() == ABI_VERSION
        self.models, self.pools, self.bound = [], [], []
        try:
            self.build(config, tp_size, shard)
        except BaseException:
            self.close()
            raise

    def build(self, config, tp_size, shard):
        for rank in range(tp_size):
            model = ct.c_void_p()
            struct = config_struct(config, rank, tp_size)
            self.must(
                self.lib.lowlat_model_create(self.platform, ct.byref(struct), ct.byref(model))
            )
            self.models.append(model)
            self.pools.append({})
            for spec in self.specs(model):
                self.bind(model, rank, spec, shard)
        for rank, model in enumerate(self.models):
            for peer, other in enumerate(self.models):
                if peer != rank:
                    handle = PeerHandle()
                    self.must(self.lib.lowlat_peer_export(other, ct.byref(handle)))
                    self.must(self.lib.lowlat_peer_import(model, peer, ct.byref(handle)))
            self.must(self.lib.lowlat_model_ready(model))

    def must(self, status):
        assert status == 0, f"status {status}: {self.lib.lowlat_last_error().decode()}"

    def specs(self, model):
        for idx in range(self.lib.lowlat_model_num_tensors(model)):
            spec = TensorSpec()
            self.must(self.lib.lowlat_model_tensor(model, idx, ct.byref(spec)))
            yield spec

    def bind(self, model, rank, spec, shard):
        shape, name = tuple(spec.shape[: spec.ndim]), spec.name.decode()
        if spec.role == POOL:
            array = self.place(np.zeros(shape, DTYPES[spec.dtype]), rank)
            self.pools[rank][name] = array
        else:
            array = self.place(np.ascontiguousarray(shard(spec, rank)), rank)
            assert array.shape == shape and array.dtype == DTYPES[spec.dtype], name
        self.bound.append(array)
        tensor = Tensor(dtype=spec.dtype, layout=spec.layout, ndim=spec.ndim, data=array)
        for dim in range(spec.ndim):
            tensor.shape[dim] = shape[dim]
            tensor.stride[dim] = array.strides[dim] // array.itemsize
        self.must(self.lib.lowlat_model_bind(model, spec.name, ct.byref(tensor)))

    def launch(self, function, structs):
        """One struct a rank; waits for every rank's end."""
        for model, struct in zip(self.models, structs, strict=True):
            self.must(function(model, ct.byref(struct), None))
        for model in self.models:
            self.must(self.lib.lowlat_synchronize(model, u64(SYNCHRONIZE_BUDGET_NS)))

    def close(self):
        self.lib.lowlat_model_destroy.restype = None
        for model in self.models:
            self.lib.lowlat_model_destroy(model)
        self.models = []
