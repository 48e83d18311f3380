// host/how_to_build.hpp: what a refusal says of kernels that the library was built without.
#pragma once

#include <string_view>

namespace lowlat::host {

// What gives a library kernels of a vendor, as the end of a refusal; "" for no vendor's name.
inline const char* how_to_build(std::string_view vendor) {
  return vendor == "nvidia" ? "; build it where nvcc is found (LOWLAT_CUDA=ON)"
         : vendor == "amd"
             ? "; build it where a clang for AMD code objects is found (LOWLAT_HIP=ON)"
             : "";
}

}  // namespace lowlat::host
