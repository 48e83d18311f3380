/* A HIP runtime with FAKE_HIP_COUNT devices, for tests of lowlat doctor. */
#include <stdio.h>

int hipGetDeviceCount(int* out_count) {
  *out_count = FAKE_HIP_COUNT;
  return FAKE_HIP_COUNT == 0 ? 100 : 0;
}

int hipDeviceGetName(char* out_name, int bytes, int idx) {
  snprintf(out_name, (size_t)bytes, "gfx950 number %d", idx);
  return 0;
}
