// host/nvidia/call.hpp: one operation's arrays on a device, and how it is launched there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "host/nvidia/device.hpp"
#include "host/op/registry.hpp"

namespace lowlat::host::cuda {

// A copy of a call's arrays in device memory. Sizes and one-element arrays (ratio, k, ...) are read
// from args(), which is the host's.
class DeviceCall {
 public:
  // Copies the inputs, and what the outputs hold: an element that is never written stays visible.
  DeviceCall(const OpSpec& op, const OpArgs& args, cudaStream_t stream);

  const OpArgs& args() const { return args_; }
  const std::string& model() const { return args_.model(); }
  cudaStream_t stream() const { return stream_; }
  std::int64_t dim(const char* symbol) const { return args_.dim(symbol); }
  int size(const char* symbol) const { return static_cast<int>(args_.dim(symbol)); }

  template <class T>
  const T* in(const char* name) const {
    return static_cast<const T*>(inputs_.at(name).data());
  }
  template <class T>
  T* out(const char* name) const {
    return static_cast<T*>(outputs_.at(name).data());
  }
  // Memory of this call, unset; the same after rewind().
  template <class T>
  T* scratch(std::int64_t count) {
    return static_cast<T*>(workspace_.take(static_cast<std::size_t>(count) * sizeof(T)));
  }
  void rewind() { workspace_.rewind(); }

  // Copies the inputs of a call of the same sizes, and what its outputs hold.
  void upload_from(const OpArgs& args);
  // Copies the outputs to the arrays of a call of the same sizes. The stream's work must be done.
  void download_to(const OpArgs& args) const;
  void download() const { download_to(args_); }

 private:
  const OpArgs& args_;
  cudaStream_t stream_;
  std::map<std::string, Memory> inputs_, outputs_;
  Workspace workspace_;
};

// Puts the launches of an operation into the call's stream. Neither waits nor copies. Throws
// OpError for a size that the kernels have not.
using Launch = void (*)(DeviceCall&);

// What launches the operation of this name; null when there is none.
Launch find_launch(std::string_view op);

}  // namespace lowlat::host::cuda
