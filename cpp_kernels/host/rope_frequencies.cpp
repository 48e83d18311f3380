#include "host/rope_frequencies.hpp"

#include <algorithm>

#include "platform/scalar.hpp"
// The platform comes before every stage.
#include "stages/rope.hpp"

namespace lowlat::host {

RopeFrequencies rope_frequencies(const lowlat_model_config& config) {
  namespace stages = lowlat::scalar::stages;
  const stages::RopeTable window = stages::rope_table(static_cast<float>(config.rope_theta), {});
  const stages::RopeTable compressed = stages::rope_table(
      static_cast<float>(config.compress_rope_theta),
      stages::yarn_ramp(config.compress_rope_theta, config.yarn_factor, config.yarn_beta_fast,
                        config.yarn_beta_slow, config.yarn_original_positions));
  RopeFrequencies out;
  std::ranges::copy(window.values, out.window);
  std::ranges::copy(compressed.values, out.compressed);
  return out;
}

}  // namespace lowlat::host
