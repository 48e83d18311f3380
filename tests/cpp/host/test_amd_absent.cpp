// The platform amd where there is no HIP runtime: one line, and nothing else is tried.
#include <dlfcn.h>

#include <string>

#include "check.hpp"
#include "host/amd/hip.hpp"
#include "host/tiny_group.hpp"

// In place of the library's, which a build without a compiler for them has not.
std::vector<lowlat::host::hip::CodeObject> lowlat::host::hip::built_code_objects() {
  return {{"gfx950", ""}};
}

namespace {

TEST_CASE(a_machine_without_the_runtime_is_refused_in_one_line) {
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
    if (dlopen(name, RTLD_NOW) != nullptr) SKIP("there is a HIP runtime here");
  }
  const lowlat_model_config config = lowlat::testing::tiny_config(LOWLAT_V41, 1, 0);
  lowlat_model* model = nullptr;
  for (const char* platform : {"amd", "amd:0", "amd:x"}) {
    CHECK_EQ(lowlat_model_create(platform, &config, &model), LOWLAT_UNSUPPORTED);
    CHECK_EQ(std::string(lowlat_last_error()),
             "platform amd needs the HIP runtime, and libamdhip64.so.7 or .6 is not to be found: "
             "install ROCm 6 or 7, or set LD_LIBRARY_PATH to its lib");
  }
}

}  // namespace
