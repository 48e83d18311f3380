// The code objects inside the library. A file of its own: a test's program brings others.
#include "host/amd/hip.hpp"

#ifdef LOWLAT_HAVE_HIP
extern "C" const char lowlat_amd_step_gfx942[], lowlat_amd_step_gfx950[];
#endif

namespace lowlat::host::hip {

std::vector<CodeObject> built_code_objects() {
#ifdef LOWLAT_HAVE_HIP
  return {{"gfx950", lowlat_amd_step_gfx950}, {"gfx942", lowlat_amd_step_gfx942}};
#else
  return {};
#endif
}

}  // namespace lowlat::host::hip
