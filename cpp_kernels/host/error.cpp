#include "host/error.hpp"

namespace lowlat::host {
namespace {

// The message, and what is said when there is no memory to keep it.
struct LastError {
  std::string message;
  const char* words = "";
};

LastError& last_error() {
  thread_local LastError last;
  return last;
}

}  // namespace

lowlat_status fail(lowlat_status status, const char* message) noexcept {
  LastError& last = last_error();
  try {
    last.message = message;
    last.words = last.message.c_str();
  } catch (const std::bad_alloc&) {
    last.words = "out of memory";
  }
  return status;
}

}  // namespace lowlat::host

extern "C" const char* lowlat_last_error(void) { return lowlat::host::last_error().words; }
