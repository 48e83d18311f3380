// test_attention.cu for two ranks' share of V4.1-Flash.
#define LOWLAT_TEST_RANKS 2
#include "test_attention.cu"
