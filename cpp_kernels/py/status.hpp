// py/status.hpp: a call's status as Python's exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "lowlat/kernels.h"

namespace lowlat::py_face {

// A refusal is a ValueError; a fault or a bug of ours is a RuntimeError.
inline void require_ok(lowlat_status status) {
  if (status == LOWLAT_OK) return;
  const std::string reason = lowlat_last_error();
  if (status == LOWLAT_INVALID || status == LOWLAT_UNSUPPORTED) {
    throw pybind11::value_error(reason);
  }
  throw std::runtime_error(reason);
}

}  // namespace lowlat::py_face
