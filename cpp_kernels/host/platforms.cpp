// Which class a model of a platform is.
#include <cstring>

#include "host/amd/model.hpp"
#include "host/how_to_build.hpp"
#include "host/model.hpp"
#include "host/scalar_model.hpp"
#ifdef LOWLAT_HAVE_CUDA
#include "host/nvidia/model.hpp"
#endif

namespace lowlat::host {

std::unique_ptr<Model> make_model(const char* platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting) {
  const std::string word = platform;
  if (word == "scalar") return std::make_unique<ScalarModel>(config, hosting);
  std::string built = "scalar";
#ifdef LOWLAT_HAVE_CUDA
  if (word == "nvidia" || word.starts_with("nvidia:")) {
    return cuda::make_model(word, config, hosting);
  }
  built += ", nvidia";
#endif
  const auto amd_code = hip::built_code_objects();
  if (!amd_code.empty()) {
    if (word == "amd" || word.starts_with("amd:")) {
      return hip::make_model(word, config, hosting, amd_code);
    }
    built += ", amd";
  }
  throw Error(LOWLAT_UNSUPPORTED, "platform is \"" + word + "\"; this library was built with: " +
                                      built + how_to_build(word.substr(0, word.find(':'))));
}

}  // namespace lowlat::host
