"""DeepSeek-V4's and V4.1's tensors as published, copied while SGLang loads them: on AMD parts its
quantisation methods shuffle and convert what they keep. A rank copies its part of each; what no
method touches is read in place.
"""

import re
from collections.abc import Mapping
from typing import Any

from lowlat import _dispatch
from lowlat.models.deepseek_v4 import DTYPES, Fact, Need
from lowlat.models.places import Bound, Places, same_size
from lowlat.reasons import refusal

EXPERT_LAYOUT = "row_major"
# Keys of the copies are (kind, name); SGLang's log sums bytes by kind.
WEIGHTS, EXPERTS, SEEN = "weights", "experts", "experts that were seen"

EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123]\.(?:weight|scale))")
# What the target's kernels read: of its layers and beside them.
TARGET = re.compile(r"layers\.\d+\..+|norm\.weight|hc_head_(?:fn|base|scale)")
# What the draft's do: what makes its context and its confidence stays SGLang's.
DRAFT = re.compile(r"mtp\.\d+\.(?!main_|confidence_head).+")
# Tables of rows, and the head: nothing shuffles them, and SGLang splits the n-grams' in its own
# way.
IN_PLACE = re.compile(r"(?:embed|head)\.weight|engram\.token_map|layers\.\d+\.engram\.embed\.\w+")
# SGLang's names of the same.
LOADED_IN_PLACE = re.compile(r"model\.embed_tokens\.weight|model\.layers\.\d+\.engram\.embed\.\w+")
# The dimension of a published tensor that is split over the ranks, by the end of its owner's name.
SPLIT = {
    "attn.wq_b": 0,
    "attn.wo_a": 0,
    "attn.wo_b": 1,
    "attn.attn_sink": 0,
    "w1": 0,
    "w3": 0,
    "w2": 1,
    "markov_head.head": 0,
    "markov_head.markov_w2": 0,
}
# Read where a model has it: the routing of image tokens.
OPTIONAL = ".ffn.gate.bias_vl"
# What the kernels' tensors call the bytes of two fp4 codes.
PAIRS = "fp4x2"


def is_read_in_place(loaded_name: str) -> bool:
    """Whether the kernels read SGLang's own tensor of this name."""
    return LOADED_IN_PLACE.fullmatch(loaded_name) is not None


def keep(copies: dict[tuple, Any], model: Any, name: str, tensor: Any) -> None:
    """The contract's ``load_tensor`` of a target: copies this rank's part of a published tensor to
    the model's device, as it is before any conversion."""
    if TARGET.fullmatch(name):
        take(copies, model, name, tensor, int(model.config.n_routed_experts))


def keep_draft(copies: dict[tuple, Any], model: Any, name: str, tensor: Any) -> None:
    """The same of a draft, whose loading passes the whole checkpoint by once more."""
    if DRAFT.fullmatch(name):
        config = model.config
        own = getattr(config, "dspark_n_routed_experts", 0)
        take(copies, model, name, tensor, int(own or config.n_routed_experts))


def take(copies: dict[tuple, Any], model: Any, name: str, tensor: Any, num_experts: int) -> None:
    """Copies what is not read in place; experts of a matrix become one tensor."""
    if IN_PLACE.fullmatch(name):
        return
    expert = EXPERT.fullmatch(name)
    own = next(model.parameters())
    part = share(name, tensor)
    if expert is None:
        copies[WEIGHTS, name] = narrowed(part).to(own.device, copy=True)
        return
    owner, number, last = expert.groups()
    stacked = f"{owner}.{last}"
    if int(number) >= num_experts:
        words = f"{name} is there; config.json has {num_experts} experts"
        raise refusal("tensor_shape", words, "the published checkpoint")
    if (EXPERTS, stacked) not in copies:
        copies[EXPERTS, stacked] = part.new_empty((num_experts, *part.shape), device=own.device)
        copies[SEEN, stacked] = own.new_zeros(num_experts).bool()
    copies[EXPERTS, stacked][int(number)].copy_(part)
    copies[SEEN, stacked][int(number)] = 1


def share(name: str, tensor: Any) -> Any:
    """This rank's part of a published tensor."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    owner = name.removesuffix(".weight").removesuffix(".scale")
    dim = next((dim for end, dim in SPLIT.items() if owner.endswith(f".{end}")), None)
    if dim is None or parallel.tp_size == 1:
        return tensor.contiguous()
    size, rest = divmod(tensor.shape[dim], parallel.tp_size)
    if rest:
        words = f"{name} has {tensor.shape[dim]} in dimension {dim}; needed a multiple of the ranks"
        raise refusal("tensor_shape", words, "another --tp-size")
    first = int(parallel.tp_group.rank_in_group) * size
    return tensor.narrow(dim, first, size).contiguous()


def narrowed(tensor: Any) -> Any:
    """Numbers of experts fit 32 bits."""
    return tensor.int() if str(tensor.dtype) == "torch.int64" else tensor


def copied(copies: Mapping[tuple, Any], name: str) -> Any:
    """The copy of a tensor by its name in the kernels, or None."""
    kind = EXPERTS if (EXPERTS, name) in copies else WEIGHTS
    return copies.get((kind, name))


def dtype_of(tensor: Any, needed: str) -> str:
    """In the kernels' words: bytes of pairs where those are needed."""
    word = str(tensor.dtype).removeprefix("torch.")
    seen = DTYPES.get(word, word)
    return needed if needed == PAIRS and seen in ("i8", "u8") else seen


def reasons(copies: Mapping[tuple, Any], specs: list[dict[str, Any]]) -> list[str]:
    """How the copies differ from what the kernels read; `specs` are ``HostedModel.tensors()``."""
    if not copies:
        words = "no tensor of the checkpoint was seen while the weights loaded"
        return [_dispatch.decline("tensor_missing", words, "--load-format auto")]
    needs, facts = [], []
    for spec in specs:
        name = spec["name"]
        tensor = copied(copies, name)
        absent = tensor is None and name.endswith(OPTIONAL)
        if spec["pool"] or absent or IN_PLACE.fullmatch(name):
            continue
        needs.append(Need(name, spec["dtype"], list(spec["shape"])))
        if tensor is not None:
            facts.append(
                Fact(name, dtype_of(tensor, spec["dtype"]), list(tensor.shape), "row_major")
            )
    told = _dispatch.check_loaded(facts, needs)
    for (kind, name), marks in copies.items():
        if kind == SEEN and not bool(marks.all()):
            words = f"{name} is of {int(marks.sum())} experts; these kernels need {len(marks)}"
            told.append(_dispatch.decline("tensor_missing", words, "the published checkpoint"))
    return told


class CopiedPlaces(Places):
    """Looks the kernels' tensors up among the copies, and those of IN_PLACE where SGLang has
    them."""

    def __init__(
        self, tensors: Mapping[str, Any], config: Mapping[str, Any], copies: Mapping[tuple, Any]
    ) -> None:
        super().__init__(tensors, config)
        self.copies = copies

    def find(self, spec: Mapping[str, Any]) -> Bound:
        """The tensor of `spec`, one of ``HostedModel.tensors()``."""
        name = spec["name"]
        if IN_PLACE.fullmatch(name):
            return super().find(spec)
        tensor = copied(self.copies, name)
        if tensor is None and name.endswith(OPTIONAL):
            # A model that takes no images has no bias of theirs, and no such rows.
            tensor = copied(self.copies, name.removesuffix("_vl"))
        if tensor is None:
            raise refusal("tensor_missing", f"{name} did not pass by while the weights loaded")
        whole = tensor.view(*spec["shape"]) if same_size(tensor, spec) else tensor
        return Bound(whole, dtype_of(tensor, spec["dtype"]), True)
