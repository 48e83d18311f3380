// host/error.hpp: how a refusal inside the library becomes a status and a message at the C border.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "lowlat/kernels.h"

namespace lowlat::host {

// What a C entry point answers with `status`; what() is the message for lowlat_last_error().
class Error : public std::runtime_error {
 public:
  Error(lowlat_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  lowlat_status status() const { return status_; }

 private:
  lowlat_status status_;
};

// Keeps the message for the calling thread's lowlat_last_error() and returns the status.
lowlat_status fail(lowlat_status status, const char* message) noexcept;

// Runs the body of a C entry point. An Error becomes its status, any other exception LOWLAT_BUG:
// none may reach C.
template <class Body>
lowlat_status border(Body&& body) noexcept {
  try {
    body();
    return LOWLAT_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(LOWLAT_BUG, "out of memory");
  } catch (const std::exception& error) {
    return fail(LOWLAT_BUG, error.what());
  } catch (...) {
    return fail(LOWLAT_BUG, "an exception that is no std::exception");
  }
}

}  // namespace lowlat::host
