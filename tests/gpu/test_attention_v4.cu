// test_attention.cu once more, for V4-Flash.
#define LOWLAT_BENCH_V4
#include "test_attention.cu"
