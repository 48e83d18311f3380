// op_call.hpp: one call of one operation, by the path that the C entry points take.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "host/op/registry.hpp"

namespace lowlat::testing {

class OpCall {
 public:
  explicit OpCall(host::OpSpec op, const char* model = "v41") : op_(std::move(op)), model_(model) {}

  // The same call of another model.
  OpCall of(const char* model) const {
    OpCall call = *this;
    call.model_ = model;
    return call;
  }

  // Gives an input, or gives it anew.
  template <class T>
  OpCall& set(const char* name, lowlat_dtype dtype, std::vector<std::int64_t> shape,
              const std::vector<T>& values) {
    remove(name);
    Bytes& bytes = memory_->emplace_back(values.size() * sizeof(T) / 8 + 1);
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size() * sizeof(T));
    lowlat_array a{};
    a.name = name;
    a.dtype = dtype;
    a.ndim = static_cast<std::uint32_t>(shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) a.shape[i] = shape[i];
    a.data = bytes.data();
    inputs_.push_back(a);
    return *this;
  }
  OpCall& set_number(const char* name, std::int64_t value) {
    return set<std::int64_t>(name, LOWLAT_I64, {}, {value});
  }
  OpCall& remove(const char* name) {
    std::erase_if(inputs_, [&](const lowlat_array& a) { return std::strcmp(a.name, name) == 0; });
    return *this;
  }

  // One output (the first, unless named) by "reference" or "scalar". All bytes are poisoned before.
  template <class T>
  std::vector<T> run(const char* platform, const char* output = nullptr) const {
    std::vector<lowlat_array> outputs;
    host::op_plan(op_, model_, platform, inputs_, outputs);
    std::vector<T> values;
    std::deque<Bytes> others;
    for (lowlat_array& a : outputs) {
      std::size_t count = 1;
      for (std::uint32_t i = 0; i < a.ndim; ++i) count *= static_cast<std::size_t>(a.shape[i]);
      const bool wanted =
          output == nullptr ? &a == outputs.data() : std::strcmp(a.name, output) == 0;
      if (wanted) {
        values.resize(count + 1);  // never empty, so that data is never null
        std::memset(values.data(), 0xa5, values.size() * sizeof(T));
        a.data = values.data();
      } else {
        a.data = others.emplace_back(count + 1, 0xa5a5a5a5a5a5a5a5u).data();
      }
    }
    host::op_run(op_, model_, platform, inputs_, outputs);
    values.pop_back();
    return values;
  }

  // The refusal of this call, "" where there is none.
  std::string refusal() const {
    try {
      std::vector<lowlat_array> outputs;
      host::op_plan(op_, model_, "scalar", inputs_, outputs);
      return "";
    } catch (const host::OpError& error) {
      return error.what();
    }
  }

 private:
  using Bytes = std::vector<std::uint64_t>;
  host::OpSpec op_;
  const char* model_;
  // Shared by copies of the call, and never written again.
  std::shared_ptr<std::deque<Bytes>> memory_ = std::make_shared<std::deque<Bytes>>();
  std::vector<lowlat_array> inputs_;
};

inline bool begins_with(const std::string& text, const char* word) {
  return text.rfind(word, 0) == 0;
}

// The named operation of one group: the entry of `model`, or the first where none has it.
inline host::OpSpec op_named(const std::vector<host::OpSpec>& ops, const char* name,
                             const char* model = "v41") {
  const host::OpSpec* first = nullptr;
  for (const host::OpSpec& op : ops) {
    if (std::strcmp(op.name, name) != 0) continue;
    const std::string models = std::string(" ") + op.models + " ";
    if (models.find(std::string(" ") + model + " ") != models.npos) return op;
    if (first == nullptr) first = &op;
  }
  if (first == nullptr) throw host::OpError(std::string(name) + " is not in the group");
  return *first;
}

}  // namespace lowlat::testing
