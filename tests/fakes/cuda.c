/* A driver library that knows two devices, for tests of lowlat doctor. FAKE_CUDA_ERROR: what
 * cuInit answers; FAKE_CRASH: it dies while it is loaded. */
#include <stdio.h>
#include <stdlib.h>

#ifndef FAKE_CUDA_ERROR
#define FAKE_CUDA_ERROR 0
#endif

#ifdef FAKE_CRASH
__attribute__((constructor)) static void crash(void) { abort(); }
#endif

int cuInit(unsigned int flags) { return flags == 0 ? FAKE_CUDA_ERROR : 1; }

int cuDeviceGetCount(int* out_count) {
  *out_count = 2;
  return 0;
}

int cuDeviceGet(int* out_device, int idx) {
  *out_device = 40 + idx;
  return 0;
}

int cuDeviceGetName(char* out_name, int bytes, int device) {
  snprintf(out_name, (size_t)bytes, "Fake %d", device);
  return 0;
}

int cuDeviceGetAttribute(int* out_value, int attribute, int device) {
  if (device < 40 || (attribute != 75 && attribute != 76)) return 1;
  *out_value = attribute == 75 ? 9 : 0;
  return 0;
}
