"""SGLang's own writer of V4.1's index keys on AMD parts, by Triton's interpreter: prints as JSON
whether every byte is where ``lowlat_pools.split_index`` says.

    python split_index.py
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache_hip import (
    store_fp4_index_k_cache_split,
)
from sglang.kernels.ops.quantization.fp4_indexer_quant import (
    quantize_fp4_indexer_tensor,
)

PAGES, ENTRIES = 3, 64


def main():
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(PAGES * ENTRIES, generator=generator)[:40]
    keys = torch.randn(len(slots), 128, generator=generator).to(torch.bfloat16)
    codes = torch.zeros((PAGES, 1, 4, ENTRIES, 16), dtype=torch.uint8)
    scales = torch.zeros((PAGES, 1, 4, ENTRIES), dtype=torch.uint8)
    store_fp4_index_k_cache_split(keys, codes, scales, slots, page_size=ENTRIES, rne=True)
    wanted, powers = quantize_fp4_indexer_tensor(keys, rne=True)
    want_codes, want_scales = torch.zeros(PAGES, 4096).byte(), torch.zeros(PAGES, 256).byte()
    for idx, slot in enumerate(slots.tolist()):
        page, i = divmod(slot, ENTRIES)
        row, word = wanted[idx].view(torch.uint8), int(powers[idx]) & 0xFFFFFFFF
        for group in range(4):
            first = (group * ENTRIES + i) * 16
            want_codes[page, first : first + 16] = row[16 * group : 16 * group + 16]
            want_scales[page, group * ENTRIES + 4 * (i % 16) + i // 16] = word >> 8 * group & 255
    told = {
        "codes": torch.equal(codes.flatten(1), want_codes),
        "scales": torch.equal(scales.flatten(1), want_scales),
        "written": int(scales.count_nonzero()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
