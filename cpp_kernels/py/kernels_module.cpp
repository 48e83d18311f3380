// lowlat._kernels: the kernels' C ABI for Python: single operations, whose arrays it moves across,
// and hosted models, whose tensors cross by address. It computes nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "lowlat/kernels.h"
#include "py/hosted.hpp"
#include "py/status.hpp"

namespace py = pybind11;

namespace {

using lowlat::py_face::require_ok;

// What numpy calls a dtype of the ABI; nullptr for one that no single operation takes.
const char* numpy_dtype(std::uint32_t dtype) {
  switch (dtype) {
    case LOWLAT_U8: return "uint8";
    case LOWLAT_I32: return "int32";
    case LOWLAT_I64: return "int64";
    case LOWLAT_F32: return "float32";
    case LOWLAT_BF16: return "uint16";
    default: return nullptr;
  }
}

std::uint32_t abi_dtype(const std::string& name, const py::array& array) {
  for (std::uint32_t dtype : {LOWLAT_U8, LOWLAT_I32, LOWLAT_I64, LOWLAT_F32, LOWLAT_BF16}) {
    // Equality of numpy dtypes looks at the byte order too: big-endian data is refused here.
    if (array.dtype().equal(py::dtype(numpy_dtype(dtype)))) return dtype;
  }
  throw py::value_error(name + " is " + py::str(array.dtype()).cast<std::string>() +
                        "; needed uint8, int32, int64, float32 or uint16 (bf16 bits) in this "
                        "machine's byte order");
}

// Every byte of an output is a NaN or 0xAA before the run, so that one left unwritten shows.
void poison(py::array& array, std::uint32_t dtype) {
  const py::ssize_t count = array.size();
  if (dtype == LOWLAT_F32) {
    auto* data = static_cast<float*>(array.mutable_data());
    for (py::ssize_t i = 0; i < count; ++i) data[i] = std::numeric_limits<float>::quiet_NaN();
  } else if (dtype == LOWLAT_BF16) {
    auto* data = static_cast<std::uint16_t*>(array.mutable_data());
    for (py::ssize_t i = 0; i < count; ++i) data[i] = 0x7fc0;
  } else if (count > 0) {
    std::memset(array.mutable_data(), 0xaa, static_cast<std::size_t>(array.nbytes()));
  }
}

py::dict run_op(const std::string& op, const std::string& model, const std::string& platform,
                const py::dict& inputs) {
  // Three lists side by side: the names and the contiguous copies outlive what points to them.
  std::vector<std::string> names;
  std::vector<py::array> held;
  std::vector<lowlat_array> in;
  names.reserve(inputs.size());
  for (const auto& [key, value] : inputs) {
    if (!py::isinstance<py::str>(key)) throw py::value_error("every input needs a name (a str)");
    const std::string name = key.cast<std::string>();
    if (!py::isinstance<py::array>(value)) throw py::value_error(name + " is not a numpy array");
    py::array array = py::reinterpret_borrow<py::array>(value);
    if (array.ndim() > LOWLAT_MAX_DIMS) {
      throw py::value_error(name + " has " + std::to_string(array.ndim()) +
                            " dimensions; needed at most " + std::to_string(LOWLAT_MAX_DIMS));
    }
    const std::uint32_t dtype = abi_dtype(name, array);
    array = py::array::ensure(array, py::array::c_style);
    if (!array) throw py::error_already_set();
    lowlat_array one{};
    one.dtype = dtype;
    one.ndim = static_cast<std::uint32_t>(array.ndim());
    for (py::ssize_t dim = 0; dim < array.ndim(); ++dim) one.shape[dim] = array.shape(dim);
    one.data = const_cast<void*>(array.data());
    names.push_back(name);
    held.push_back(std::move(array));
    in.push_back(one);
  }
  for (std::size_t i = 0; i < in.size(); ++i) in[i].name = names[i].c_str();
  const auto num_inputs = static_cast<std::int32_t>(in.size());

  std::array<lowlat_array, LOWLAT_MAX_OP_OUTPUTS> out{};
  std::int32_t num_outputs = 0;
  require_ok(lowlat_op_plan(op.c_str(), model.c_str(), platform.c_str(), in.data(), num_inputs,
                            out.data(), &num_outputs));
  std::vector<std::string> out_names;
  std::vector<py::array> results;
  out_names.reserve(static_cast<std::size_t>(num_outputs));
  for (std::int32_t i = 0; i < num_outputs; ++i) {
    const char* dtype = numpy_dtype(out[i].dtype);
    if (dtype == nullptr) throw std::runtime_error(op + " plans an output of no dtype of numpy");
    out_names.emplace_back(out[i].name);
    results.emplace_back(py::dtype(dtype),
                         std::vector<py::ssize_t>(out[i].shape, out[i].shape + out[i].ndim));
    poison(results.back(), out[i].dtype);
    out[i].data = results.back().mutable_data();
    out[i].name = out_names.back().c_str();
  }
  lowlat_status status = LOWLAT_OK;
  {
    const py::gil_scoped_release unlocked;
    status = lowlat_op_run(op.c_str(), model.c_str(), platform.c_str(), in.data(), num_inputs,
                           out.data(), num_outputs);
  }
  require_ok(status);
  py::dict named;
  for (std::size_t i = 0; i < results.size(); ++i) named[py::str(out_names[i])] = results[i];
  return named;
}

// Why the library makes no model on that platform; empty when it does. An empty configuration is
// refused too, but for itself, and only after the platform.
std::string model_refusal(const std::string& platform) {
  lowlat_model_config config{};
  config.struct_bytes = sizeof(config);
  lowlat_model* model = nullptr;
  const lowlat_status status = lowlat_model_create(platform.c_str(), &config, &model);
  lowlat_model_destroy(model);
  return status == LOWLAT_UNSUPPORTED ? lowlat_last_error() : "";
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
  module.doc() =
      "The kernels' C ABI: its version, single operations, and models hosted by another engine.";
  if (lowlat_kernels_abi_version() != LOWLAT_KERNELS_ABI_VERSION) {
    throw py::import_error("the kernel library has ABI version " +
                           std::to_string(lowlat_kernels_abi_version()) +
                           "; lowlat._kernels needs " + std::to_string(LOWLAT_KERNELS_ABI_VERSION) +
                           " (install lowlat again)");
  }
  lowlat::py_face::define_hosted_model(module);
  module.def("abi_version", &lowlat_kernels_abi_version, "Version of the kernels' C ABI.");
  module.def(
      "op_list", [] { return std::string(lowlat_op_list()); },
      "The operations as JSON: names, arrays, dtypes, shapes and numerics.");
  module.def("model_refusal", &model_refusal, py::arg("platform"),
             "Why the library makes no model on that platform, in one line; empty when it does.");
  module.def("run_op", &run_op, py::arg("op"), py::arg("model"), py::arg("platform"),
             py::arg("inputs"),
             "Runs one operation on named numpy arrays and returns its named outputs. bf16 travels "
             "as uint16 bits; e4m3, ue8m0 and packed fp4 as uint8. Raises ValueError, one line, "
             "when the operation refuses.");
}
