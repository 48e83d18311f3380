// host/checks.hpp: checks of what a call points to.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "host/model.hpp"

namespace lowlat::host {

// values[0 .. n - 1] within low .. high, else one line that names the first that is not.
template <class Int>
void require_values(const Int* values, std::int64_t n, std::int64_t low, std::int64_t high,
                    const char* name) {
  if (n > 0 && values == nullptr) throw invalid(std::string(name) + " is NULL");
  for (std::int64_t i = 0; i < n; ++i) {
    if (low <= values[i] && values[i] <= high) continue;
    throw invalid(std::string(name) + "[" + std::to_string(i) + "] is " +
                  std::to_string(values[i]) + "; needed " + std::to_string(low) + " .. " +
                  std::to_string(high));
  }
}

// A pointer that a call needs, and its name.
struct Named {
  const void* pointer;
  const char* name;
};
inline void require_pointers(std::initializer_list<Named> all) {
  for (const Named& one : all) {
    if (one.pointer == nullptr) throw invalid(std::string(one.name) + " is NULL");
  }
}

}  // namespace lowlat::host
