// Which class a model of a platform is.
#include <cstring>

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
#ifdef LOWLAT_HAVE_CUDA
  if (word == "nvidia" || word.starts_with("nvidia:")) {
    return cuda::make_model(word, config, hosting);
  }
  const char* built = "scalar, nvidia";
#else
  const char* built = "scalar";
#endif
  throw Error(LOWLAT_UNSUPPORTED,
              "platform is \"" + word + "\"; this library was built with: " + built);
}

}  // namespace lowlat::host
