// host/nvidia/fused_base.hpp: what the fused schedules of a whole model share: reasons against a
// model, memory, launches that more than one of them has, and loading of kernels before they run.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "fused/draft.hpp"
#include "fused/exchange.hpp"
#include "fused/exchange_mix.hpp"
#include "fused/index.hpp"
#include "host/nvidia/exchange_region.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host::cuda {

// Why fused kernels do not serve a model on a device: every reason, in one line.
class Reasons {
 public:
  void add(const std::string& reason) { text_ += (text_.empty() ? "" : "; ") + reason; }
  void need(std::int64_t seen, std::int64_t needed, const char* name);
  void need_ranks(int seen, std::initializer_list<int> needed);
  void need_sms(int device, int needed);
  // A rank's part of it: the head's product writes sixteen logits at a time.
  void need_vocab(const shape::RuntimeShape& shape);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// One rank's model as the host's launches have it. Pointers of the weights are the device's.
struct FusedBase {
  lowlat_model_config config;
  shape::RuntimeShape shape;
  lowlat::persistent::ModelWeights weights;
  nvidia::fused::ExchangePort port;
  std::uint64_t* step_epoch;  // device word of the region
  std::vector<Memory> pieces;

  // On the region's device, whose peers are open. kernel: the catalogue's line.
  FusedBase(const lowlat_model_config& config, const shape::RuntimeShape& shape,
            const lowlat::persistent::ModelWeights& weights, const ExchangeRegion& region,
            std::uint32_t kernel);
  FusedBase(const FusedBase&) = delete;
  FusedBase& operator=(const FusedBase&) = delete;

  // Zeroed elements, which live as long as this.
  template <class T>
  T* take(std::int64_t count) {
    const auto elements = static_cast<std::size_t>(std::max<std::int64_t>(count, 1));
    Memory& piece = pieces.emplace_back(elements * sizeof(T));
    check(cudaMemset(piece.data(), 0, piece.bytes()), "cudaMemset");
    return static_cast<T*>(piece.data());
  }
  std::uint64_t bytes() const;

  // V4's weights of a head, which has four outputs, as those of a sublayer, whose other twenty are
  // zeros here.
  nvidia::fused::HyperWeights laid_head(const lowlat::persistent::HcWeights& head);

  // The head's product of x bf16 [rows, hidden]: two sums a logit, to partial [2, rows,
  // vocab_local]. x_done.word NULL: at the end of the kernels before.
  void launch_head_product(const nvidia::fused::StepRows& rows, const std::uint16_t* x,
                           float* partial, nvidia::fused::Gate x_done, cudaStream_t stream) const;
  // Proposals from logits [batch_size * kDraftSteps, vocab_local], with all that is not of one
  // caller.
  nvidia::fused::DraftProposalsParams proposals(int batch_size, const float* base,
                                                const std::int64_t* anchors,
                                                std::int64_t* tokens) const;
};

// A kernel's first use loads its code, which may wait for kernels that run, such as one that waits
// for a peer whose code is still to be loaded. Capturing loads it, and runs nothing.
template <class Launch>
void load_kernels_of(Launch launch) {
  const Stream stream;
  Capture capture(stream.get());
  launch(stream.get());
  capture.end();
}

}  // namespace lowlat::host::cuda
