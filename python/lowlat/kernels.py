"""The kernels of one model on one rank, behind SGLang: weights bound where they lie, caches at
SGLang's addresses, steps on its stream. The same for every platform but for where the pointers
point.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowlat import _dispatch, _kernels
from lowlat.models.deepseek_v4 import DTYPES, STREAMS, expands_wo_a
from lowlat.models.places import EMBEDDING, HEAD, Places
from lowlat.models.published import CopiedPlaces
from lowlat.reasons import refusal
from lowlat.replay import StepOutput, is_capturing
from lowlat.watch import Watch

# Ring rows without drafts: of V4.1's pairs, and of V4's ratio 4.
PLAIN_RINGS = {1: 2, 2: 8}
INDEX_SLOTS = 64
MOST_REQUESTS = 1 << 24  # where nothing is kept of a request
SYNCHRONIZE_BUDGET_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Platform:
    """Where kernels run: the library's word for it, and whether SGLang's stream is theirs. Where
    it is not, a call returns when its work is done."""

    word: str
    on_stream: bool

    def stream(self) -> int:
        if not self.on_stream:
            return 0
        import torch

        stream = torch.cuda.current_stream()
        return stream.cuda_stream


SCALAR = Platform("scalar", False)


def hosted_config(request: Any) -> dict[str, Any]:
    """The dict of ``_kernels.HostedModel`` for a ``build.Request``."""
    config = json.loads(_dispatch.kernel_config(request.config_json))
    page_size = request.page_size
    is_draft = request.mode == "draft"
    if is_draft:
        config["draft_block"] = request.tokens_per_request
    elif request.mode == "decode":
        config["num_draft_stages"] = 0
        config["draft_target_layers"] = []
        config["state_ring"] = PLAIN_RINGS[config["kind"]]
    else:
        config["draft_block"] = request.tokens_per_request - 1
    return config | {
        "tp_rank": request.tp_rank,
        "tp_size": request.tp_size,
        "widths": list(request.widths),
        "max_batch": request.widths[-1] // request.tokens_per_request,
        "max_rows": request.widths[-1],
        "page_size": page_size,
        # Of the longest request; the pools' own pages come with them. Proposals read none.
        "num_pages": 1 if is_draft else -(-config["max_positions"] // page_size),
        "wait_budget_ns": request.wait_budget_ns,
    }


def hosting(request: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What being hosted adds to it."""
    is_draft = request.mode == "draft"
    # SGLang expands a draft's wo_a when it loads, V4.1's, and V4's on Hopper; a copy from before is
    # whole.
    wide = request.copies is None and (
        request.stages if is_draft else config["kind"] == 1 or expands_wo_a(request.tensors.items())
    )
    return {
        "expert_layout": request.expert_layout,
        "bf16_wo_a": int(wide),
        "proposals": int(is_draft),
        "stages": int(request.stages),
    }


def layout_words(model: Any) -> str:
    """How tensors are handed over, the same on every rank."""
    return "\n".join(f"{spec['name']} {spec['dtype']} {spec['layout']}" for spec in model.tensors())


class HostedKernels:
    """What a build makes of ``build.Request``: ``build.Kernels`` over ``_kernels.HostedModel``."""

    def __init__(self, request: Any, platform: Platform) -> None:
        self.request = request
        self.platform = platform
        self.is_draft = request.mode == "draft"
        self.config = self.model_config()
        word = platform.word
        if platform.on_stream:
            word = f"{word}:{request.device}"
        self.model = _kernels.HostedModel(word, self.config, hosting(request, self.config))
        # Copies of ours, which live as long as the kernels.
        self.relaid: list[Any] = []
        self.bound: dict[str, Any] = {}
        self.seen: tuple[Any, ...] | None = None
        self.pools: dict[str, Any] = {}
        self.is_ready = False
        self.watch: Watch | None = None
        self.shape = f"{request.mode} of {request.tokens_per_request} rows a request"
        self.numerics = self.model.catalogue
        self.layout = layout_words(self.model)
        self.catalogue_digest = self.model.catalogue_digest
        self.bind()

    @property
    def own_bytes(self) -> int:
        """Bytes beside the weights: the kernels' own, and copies of what had to be re-laid."""
        return self.model.own_bytes + sum(
            copy.numel() * copy.element_size() for copy in self.relaid
        )

    def model_config(self) -> dict[str, Any]:
        return hosted_config(self.request)

    def places(self) -> Places:
        """Where the weights lie: among SGLang's, or among copies of the published ones."""
        request = self.request
        if request.copies is None:
            return Places(request.tensors, self.config)
        return CopiedPlaces(request.tensors, self.config, request.copies)

    def bind(self) -> None:
        """Binds every weight but the draft's head and embedding; a refusal where one is missing or
        lies otherwise than the kernels read it."""
        places = self.places()
        for spec in self.model.tensors():
            if spec["pool"] or spec["name"] == HEAD:
                continue
            if self.is_draft and spec["name"] == EMBEDDING:
                continue
            found = places.find(spec)
            if found.relaid:
                self.relaid.append(found.tensor)
            self.bound[spec["name"]] = found.tensor
            self.model.bind(spec["name"], given(found.tensor, found.dtype))

    def export(self) -> bytes:
        """This rank's handle for its peers."""
        return self.model.peer_export()

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens every peer's memory, by handles in the order of the ranks."""
        for rank, handle in enumerate(handles):
            if rank != self.request.tp_rank:
                self.model.peer_import(rank, handle)
        if not self.is_draft:
            self.become_ready()

    def attach(self, model: Any) -> None:
        """The draft's head and embedding, once SGLang has attached the target's to it."""
        if self.is_ready:
            return
        self.bound[HEAD] = model.lm_head.weight
        if self.request.stages:
            self.bound[EMBEDDING] = model.embed_tokens.weight
        for name in (HEAD, EMBEDDING):
            if name in self.bound:
                self.model.bind(name, given(self.bound[name]))
        self.become_ready()

    def become_ready(self) -> None:
        """Every tensor is bound and every peer open: ends the building, and has faults watched."""
        try:
            self.model.ready()
        except ValueError as error:  # of what the loaded tensors hold
            words = " ".join(str(error).split())
            raise refusal("tensor_layout", words, "the published checkpoint") from error
        self.is_ready = True
        # A call that returns with its work done tells of a fault by itself.
        if self.platform.on_stream:
            self.watch = Watch(
                self,
                self.model,
                rank=self.request.tp_rank,
                facts=self.facts(),
                is_patient=self.request.dumps_crashes,
            )

    def facts(self) -> dict[str, Any]:
        """What a post-mortem says of this rank's kernels."""
        request = self.request
        return {
            "platform": self.platform.word,
            "device": request.device,
            "mode": request.mode,
            "tokens_per_request": request.tokens_per_request,
            "widths": list(request.widths),
            "tp_rank": request.tp_rank,
            "tp_size": request.tp_size,
            "wait_budget_ns": request.wait_budget_ns,
            "catalogue": self.model.catalogue.splitlines(),
        }

    # ------------------------------------------------------------------ steps

    def reads(self, view: Any) -> dict[str, Any]:
        """The caches that steps read and write, by name, as `view` gives them now."""
        pool = view.kv_pool
        raw = pool.pool
        found = {}
        for spec in self.model.tensors():
            if not spec["pool"]:
                continue
            name = spec["name"]
            if self.is_draft:
                # mtp.N.kv.swa, the window's keys of layer N of the draft's own cache.
                found[name] = pool.get_swa_key_buffer_radix(int(name.split(".")[1]))
                continue
            kind, _, layer = name.rpartition(".")
            match kind:
                case "kv.swa":
                    found[name] = pool.get_swa_key_buffer_radix(int(layer))
                case "kv.extra":
                    found[name] = pool.get_extra_key_buffer(int(layer))
                case "kv.index" if self.splits_index(raw, int(layer)):
                    scales = raw.get_index_k_fp4_scale_buffer(int(layer))
                    codes = raw.get_index_k_fp4_payload_buffer(int(layer)).view(scales.dtype)
                    found[name] = codes.flatten(1)
                    found[f"kv.index_scales.{layer}"] = scales.flatten(1)
                case "kv.index":
                    found[name] = raw.get_index_k_with_scale_buffer(int(layer))
                case "kv.state":
                    states = raw.get_attention_compress_states(int(layer))
                    found[name] = states.kv_score_buffer.kv_score
                case "kv.index_state":
                    states = raw.get_indexer_compress_states(int(layer))
                    found[name] = states.kv_score_buffer.kv_score
        if self.is_draft:
            return found
        found["window_slots"] = raw.full_to_swa_index_mapping
        if self.config["num_engrams"]:
            found["history"] = self.request.model.model.engram_hasher.history
        return found

    def splits_index(self, raw: Any, layer: int) -> bool:
        """Whether codes and scales of a layer's index keys are two buffers, as V4.1's are on AMD
        parts."""
        return self.config["kind"] == 1 and raw.low_ratio_index_k_is_split(layer)

    def check_pools(self, view: Any) -> None:
        """Caches that lie in another way than the kernels read them."""
        pool, page_size = view.kv_pool, self.request.page_size
        told = []
        if pool.uniform_fp8 or pool.request_window is not None:
            told.append("the cache is of another kind than pages of 576 data bytes a token")
        if pool.get_swa_key_page_size() != page_size:
            told.append(f"the window's pages have {pool.get_swa_key_page_size()} tokens")
        dtype = dtype_of(pool.get_swa_key_buffer_radix(0))
        if dtype not in ("u8", "e4m3"):
            told.append(f"the window's keys are {dtype}, where e4m3 is read")
        for layer, plan in enumerate(self.config["layers"]):
            if self.is_draft or plan["index_source"] < 0 or plan["kv_source"] != layer:
                continue
            if self.splits_index(pool.pool, layer) and pool.pool.low_ratio_index_k_page8(layer):
                told.append(f"the index's pages of ratio {plan['ratio']} are of 8 entries")
            slots = pool.pool.get_index_k_page_size(plan["ratio"])
            if slots != INDEX_SLOTS:
                told.append(f"the index's pages of ratio {plan['ratio']} have {slots} entries")
        if told:
            needed = f"pages of {page_size} tokens and {INDEX_SLOTS} index entries are needed"
            raise refusal("tensor_layout", f"{'; '.join(dict.fromkeys(told))}; {needed}")

    def take_pools(self, view: Any) -> None:
        """Binds SGLang's caches, the first time and whenever they moved."""
        pools = self.reads(view)
        seen = tuple((name, t.data_ptr(), tuple(t.shape)) for name, t in pools.items())
        if seen == self.seen:
            return
        self.check_pools(view)
        if self.is_draft:
            # Rows come with the slots that they see.
            self.bind_pools(pools, num_pages=1, num_requests=1)
        else:
            self.bind_target_pools(pools)
        self.seen, self.pools = seen, pools

    def bind_target_pools(self, pools: dict[str, Any]) -> None:
        """A target's caches, with where a slot's window key lies and what a request has."""
        page_size, ring = self.request.page_size, self.config["state_ring"]
        mapping, history = pools["window_slots"], pools.get("history")
        full = [t.shape[0] for name, t in pools.items() if name.startswith("kv.extra.")]
        num_pages = min([*full, mapping.numel() // page_size])
        requests = [] if history is None else [history.shape[0]]
        for layer, plan in enumerate(self.config["layers"]):
            state = pools.get(f"kv.state.{layer}")
            if state is not None and plan["ratio"] in (2, 128):
                rows = ring if plan["ratio"] == 2 else 16 * ring
                requests.append(state.shape[0] // rows)
        self.bind_pools(
            {name: tensor for name, tensor in pools.items() if name.startswith("kv.")},
            num_pages=num_pages,
            num_requests=min(requests, default=MOST_REQUESTS),
            window_slots=needs(mapping, "i64", "window_slots").data_ptr(),
            history=0 if history is None else needs(history, "i32", "history").data_ptr(),
        )

    def bind_pools(
        self,
        pools: dict[str, Any],
        *,
        num_pages: int,
        num_requests: int,
        window_slots: int = 0,
        history: int = 0,
    ) -> None:
        """Binds SGLang's caches, by the kernels' names. window_slots: the address of the i64 map
        from full to window slots; history: that of the i32 tokens of n-gram memory; 0: none."""
        windows = [t.shape[0] for name, t in pools.items() if "kv.swa" in name]
        self.model.bind_pools(
            num_pages=num_pages,
            num_window_pages=min(windows),
            num_requests=num_requests,
            window_slots=window_slots,
            history=history,
            split_index=any(name.startswith("kv.index_scales.") for name in pools),
            pools=[
                (name, given(tensor, "u8" if tensor.element_size() == 1 else None))
                for name, tensor in pools.items()
            ],
        )

    def step(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> StepOutput:
        """Runs a covered step: every row's hidden state, and what the draft reads."""
        self.take_pools(step.view)
        core = step.view.metadata.core_attn_metadata
        rows, tokens = step.rows, self.request.tokens_per_request
        batch_size = rows // tokens
        self.note(step.mode, batch_size, rows)
        config = self.config
        gains = self.bound["norm.weight"]
        hidden = gains.new_empty(rows, config["hidden"])
        features = streams = None
        if config["num_draft_stages"]:
            features = gains.new_empty(rows, config["num_draft_stages"] * config["hidden"])
        else:
            streams = gains.new_empty(rows, STREAMS * config["hidden"])
        # In graphs of verify steps SGLang keeps slots as i32.
        slots = core.raw_out_loc
        if dtype_of(slots) == "i32":
            slots = slots.long()
        needs(slots, "i64", "raw_out_loc")
        # Tables are a row's; a request's rows have the same one.
        table = needs(core.page_table, "i32", "page_table", strided=True)
        self.model.step(
            mode=step.mode,
            batch_size=batch_size,
            tokens_per_request=tokens,
            page_table_stride=tokens * table.stride(0),
            num_table_pages=table.shape[1],
            token_ids=needs(input_ids, "i64", "input_ids").data_ptr(),
            positions=needs(positions, "i64", "positions").data_ptr(),
            slots=slots.data_ptr(),
            requests=needs(forward_batch.req_pool_indices, "i64", "req_pool_indices").data_ptr(),
            page_table=table.data_ptr(),
            hidden=hidden.data_ptr(),
            features=0 if features is None else features.data_ptr(),
            streams=0 if streams is None else streams.data_ptr(),
            stream=self.platform.stream(),
        )
        self.finish()
        return StepOutput(hidden, aux_hidden=features, before_norm=streams)

    def draft_layers(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """Runs the layers of a draft's block: what the last one left, before the norm."""
        # Says where rows write, and joins what SGLang still writes of the context.
        slots = needs(step.view.swa_out_cache_loc(forward_batch), "i32", "swa_out_cache_loc")
        self.take_pools(step.view)
        core = step.view.metadata.core_attn_metadata
        window = needs(core.swa_page_indices, "i32", "swa_page_indices", strided=True)
        # Where a row sees nothing behind itself, as of V4 on AMD parts, its list is shorter.
        width = self.config["window"] + self.request.tokens_per_request
        if window.shape[1] < width:
            short, window = window, window.new_full((step.rows, width), -1)
            window[:, : short.shape[1]] = short
        batch_size = step.rows // self.request.tokens_per_request
        self.note("draft", batch_size, step.rows)
        streams = () if self.config["kind"] == 1 else (STREAMS,)
        gains = self.bound[EMBEDDING]
        hidden = gains.new_empty(step.rows, *streams, self.config["hidden"])
        self.model.draft(
            batch_size=batch_size,
            window_stride=window.stride(0),
            token_ids=needs(input_ids, "i64", "input_ids").data_ptr(),
            positions=needs(positions, "i64", "positions").data_ptr(),
            key_slots=slots.data_ptr(),
            window=window.data_ptr(),
            hidden=hidden.data_ptr(),
            stream=self.platform.stream(),
        )
        self.finish()
        return hidden

    def draft(
        self,
        *,
        hidden: Any,
        anchors: Any,
        temperatures: Any,
        noise_key: int,
        noise_offset: Any,
        out_tokens: Any,
        out_logits: Any,
    ) -> Any:
        """Proposes a block; the arguments are those of ``replay.DraftMegakernel.draft_sampler``."""
        batch_size, gamma = out_tokens.shape
        self.note("draft", batch_size, batch_size * gamma)
        temperature = 0
        if temperatures is not None:
            temperature = needs(temperatures, "f32", "step_temperatures").data_ptr()
        self.model.propose(
            batch_size=batch_size,
            hidden=needs(hidden, "bf16", "hidden_states").data_ptr(),
            anchors=needs(anchors, "i64", "anchor_tokens").data_ptr(),
            temperature=temperature,
            noise_offset=needs(noise_offset, "i64", "noise.offset").data_ptr(),
            noise_key=noise_key,
            draft_tokens=needs(out_tokens, "i64", "draft_tokens").data_ptr(),
            draft_logits=0 if out_logits is None else needs(out_logits, "f32", "logits").data_ptr(),
            stream=self.platform.stream(),
        )
        self.finish()
        return hidden

    def note(self, mode: str, batch_size: int, rows: int) -> None:
        """A graph that is being captured, for a post-mortem."""
        if self.watch is not None and is_capturing():
            self.watch.captured({"mode": mode, "batch_size": batch_size, "rows": rows})

    def finish(self) -> None:
        if not self.platform.on_stream:
            self.model.synchronize(SYNCHRONIZE_BUDGET_NS)


def dtype_of(tensor: Any) -> str:
    word = str(tensor.dtype).removeprefix("torch.")
    return DTYPES.get(word, word)


def given(tensor: Any, dtype: str | None = None) -> tuple[int, list[int], str]:
    """A contiguous tensor as ``HostedModel`` takes it."""
    return tensor.data_ptr(), list(tensor.shape), dtype or dtype_of(tensor)


def needs(tensor: Any, dtype: str, name: str, strided: bool = False) -> Any:
    """The tensor, when it is what the kernels read."""
    seen = dtype_of(tensor)
    whole = tensor.stride(-1) == 1 if strided else tensor.is_contiguous()
    if seen == dtype and whole:
        return tensor
    words = f"{name} is {seen}, {'contiguous' if whole else 'strided'}; needed {dtype}, contiguous"
    raise refusal("tensor_dtype", words)
