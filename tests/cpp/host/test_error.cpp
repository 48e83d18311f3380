// The last error of a thread, and what an exception becomes at the C border.
#include "host/error.hpp"

#include <string>
#include <thread>

#include "check.hpp"

namespace {

using lowlat::host::border;
using lowlat::host::Error;
using lowlat::host::fail;

std::string last() { return lowlat_last_error(); }

}  // namespace

TEST_CASE(no_error_before_any) {
  std::string seen = "unset";
  std::thread([&] { seen = last(); }).join();  // a thread that never failed
  CHECK_EQ(seen, "");
}

TEST_CASE(keeps_the_last_message_and_returns_the_status) {
  std::string message = "width is 7; needed 6";
  CHECK_EQ(fail(LOWLAT_UNSUPPORTED, message.c_str()), LOWLAT_UNSUPPORTED);
  message.assign("gone");
  CHECK_EQ(last(), "width is 7; needed 6");
  CHECK_EQ(fail(LOWLAT_FAULT, "a"), LOWLAT_FAULT);
  CHECK_EQ(last(), "a");
}

TEST_CASE(each_thread_has_its_own) {
  fail(LOWLAT_INVALID, "mine");
  std::thread([] { fail(LOWLAT_INVALID, "theirs"); }).join();
  CHECK_EQ(last(), "mine");
}

TEST_CASE(border_turns_exceptions_into_statuses) {
  CHECK_EQ(border([] {}), LOWLAT_OK);
  CHECK_EQ(border([] { throw Error(LOWLAT_FAULT, "rank 1 is late"); }), LOWLAT_FAULT);
  CHECK_EQ(last(), "rank 1 is late");
  CHECK_EQ(border([] { throw std::logic_error("broken rule"); }), LOWLAT_BUG);
  CHECK_EQ(last(), "broken rule");
  CHECK_EQ(border([] { throw std::bad_alloc(); }), LOWLAT_BUG);
  CHECK_EQ(last(), "out of memory");
  CHECK_EQ(border([] { throw 3; }), LOWLAT_BUG);
}

TEST_CASE(success_keeps_the_message) {
  fail(LOWLAT_INVALID, "earlier");
  CHECK_EQ(border([] {}), LOWLAT_OK);
  CHECK_EQ(last(), "earlier");
}
