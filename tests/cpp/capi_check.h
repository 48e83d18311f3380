/* Checks of the C programs over the dispatcher: counted, and told with the last error. Included
 * once a program, after its feature macros. */
#ifndef LOWLAT_TESTS_CAPI_CHECK_H_
#define LOWLAT_TESTS_CAPI_CHECK_H_

#include <lowlat/dispatch.h>
#include <stdio.h>
#include <string.h>

static int num_passed = 0;
static int num_failed = 0;

static void check(int holds, const char* what, int line) {
  if (holds) {
    ++num_passed;
  } else {
    fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, lowlat_dispatch_last_error());
    ++num_failed;
  }
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define OK(call) CHECK((call) == LOWLAT_DISPATCH_STATUS_OK)

/* The call ends so, in one line that holds `words`. */
static inline void check_refused(lowlat_dispatch_status status, lowlat_dispatch_status expected,
                                 const char* words, const char* what, int line) {
  const char* error = lowlat_dispatch_last_error();
  check(status == expected && strstr(error, words) != NULL && strchr(error, '\n') == NULL, what,
        line);
}
#define INVALID(call, words) \
  check_refused((call), LOWLAT_DISPATCH_STATUS_INVALID, (words), #call, __LINE__)

/* The program's exit status. */
static int closing(void) {
  printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}

#endif /* LOWLAT_TESTS_CAPI_CHECK_H_ */
