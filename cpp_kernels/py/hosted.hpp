// py/hosted.hpp: a hosted model of the C ABI as a Python class.
#pragma once

#include <pybind11/pybind11.h>

namespace lowlat::py_face {

void define_hosted_model(pybind11::module_& module);

}  // namespace lowlat::py_face
