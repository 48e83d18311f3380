/* The C face's groups of processes in C11: forked ranks that vote, and every wrong way to join. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi_check.h"

#define DECLINE(call, words) \
  check_refused((call), LOWLAT_DISPATCH_STATUS_DECLINE, (words), #call, __LINE__)
#define FAULT(call, words) \
  check_refused((call), LOWLAT_DISPATCH_STATUS_FAULT, (words), #call, __LINE__)

static const uint64_t kMs = 1000u * 1000u;
/* Long enough for a process to be born on a machine with other work. */
static const uint64_t kPatienceNs = 60ull * 1000u * 1000u * 1000u;

static lowlat_ladder good_ladder(void) {
  const lowlat_ladder ladder = {kMs, kPatienceNs, kPatienceNs + kMs, kPatienceNs + 2 * kMs};
  return ladder;
}

/* A name that no other run of this program has. */
static const char* group_name(const char* word) {
  static char name[64];
  snprintf(name, sizeof name, "capi-%s-%ld", word, (long)getpid());
  return name;
}

static lowlat_dispatch_status join(const char* name, uint32_t rank, uint32_t size, uint64_t budget,
                                   lowlat_seat** out_seat) {
  const lowlat_ladder ladder = good_ladder();
  return lowlat_group_join(name, rank, size, &ladder, budget, out_seat);
}

/* A rank that votes `num_votes` times; its status says how many agreed. */
static pid_t fork_rank(const char* name, uint32_t rank, uint32_t size, int num_votes) {
  const pid_t pid = fork();
  if (pid == 0) {
    lowlat_seat* seat = NULL;
    int agreed = 0;
    if (join(name, rank, size, kPatienceNs, &seat) != LOWLAT_DISPATCH_STATUS_OK) _exit(99);
    for (int idx = 0; idx < num_votes; ++idx) {
      agreed +=
          lowlat_seat_agree_step(seat, (uint64_t)idx, kPatienceNs) == LOWLAT_DISPATCH_STATUS_OK;
    }
    /* As a crash: it leaves nothing in order. */
    _exit(agreed);
  }
  return pid;
}

static int exit_status(pid_t pid) {
  int status = -1;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void processes_vote(void) {
  const char* name = group_name("vote");
  lowlat_seat* seat = NULL;
  const pid_t first = fork_rank(name, 1, 3, 50);
  const pid_t second = fork_rank(name, 2, 3, 50);
  OK(join(name, 0, 3, kPatienceNs, &seat));
  int agreed = 0;
  for (int idx = 0; idx < 50; ++idx) {
    agreed += lowlat_seat_agree_step(seat, (uint64_t)idx, kPatienceNs) == LOWLAT_DISPATCH_STATUS_OK;
  }
  CHECK(agreed == 50);
  CHECK(exit_status(first) == 50 && exit_status(second) == 50);
  /* They are gone: a fault that names one, and for good. */
  FAULT(lowlat_seat_agree_step(seat, 50, 50 * kMs),
        "[401] rank 1 did not answer the vote of epoch");
  CHECK(lowlat_dispatch_last_reason() == LOWLAT_REASON_RANK_MISSING);
  FAULT(lowlat_seat_agree_step(seat, 51, kPatienceNs), "[401] rank 1 did not answer");
  /* A fresh group of the name starts while the seat of the old one lives. */
  lowlat_seat* fresh = NULL;
  const pid_t again = fork_rank(name, 1, 2, 1);
  OK(join(name, 0, 2, kPatienceNs, &fresh));
  OK(lowlat_seat_agree_step(fresh, 0, kPatienceNs));
  CHECK(exit_status(again) == 1);
  OK(lowlat_seat_destroy(seat));
  OK(lowlat_seat_destroy(fresh));
}

/* Coverage among processes is the same call as among threads. */
static void coverage_is_voted(void) {
  const uint32_t widths[] = {1, 2};
  const lowlat_ballot ballot = {widths, 2, 1, 2, 3, good_ladder()};
  lowlat_servable* servable = NULL;
  lowlat_seat* seat = NULL;
  lowlat_coverage* coverage = NULL;
  uint32_t epoch = 0;
  OK(lowlat_guard("{\"name\": \"mine\", \"isas\": [\"cpu\"]}", "{\"isa\": \"cpu\", \"tp_size\": 1}",
                  &servable));
  OK(join(group_name("coverage"), 0, 1, kPatienceNs, &seat));
  OK(lowlat_seat_vote(seat, servable, &ballot, kPatienceNs, &coverage));
  OK(lowlat_coverage_epoch(coverage, &epoch));
  CHECK(epoch == 1);
  DECLINE(lowlat_seat_decline(seat, LOWLAT_REASON_FEATURE, kPatienceNs), "[307] rank 0 declines");
  INVALID(lowlat_seat_agree_step(seat, 1, 0), "budget is 0 ns");
  INVALID(lowlat_seat_agree_step(seat, 1, kPatienceNs + kMs), "shorter than the collective budget");
  OK(lowlat_coverage_destroy(coverage));
  OK(lowlat_servable_destroy(servable));
  OK(lowlat_seat_destroy(seat));
  INVALID(lowlat_seat_agree_step(seat, 1, 1), "seat was destroyed before");
}

static void arguments_are_checked(void) {
  lowlat_seat* seat = NULL;
  lowlat_ladder ladder = good_ladder();
  static char long_name[100000];
  memset(long_name, 'x', sizeof long_name - 1);
  INVALID(join(NULL, 0, 1, kMs, &seat), "name is NULL");
  INVALID(lowlat_group_join("a", 0, 1, NULL, kMs, &seat), "ladder is NULL");
  INVALID(lowlat_group_join("a", 0, 1, &ladder, kMs, NULL), "out_seat is NULL");
  INVALID(join("\xff", 0, 1, kMs, &seat), "name is not UTF-8");
  INVALID(join("", 0, 1, kMs, &seat), "1 to 64 letters, digits");
  CHECK(lowlat_dispatch_last_reason() == 0);
  INVALID(join("../a", 0, 1, kMs, &seat), "1 to 64 letters, digits");
  INVALID(join("a\nb", 0, 1, kMs, &seat), "group name is \"a\\nb\"");
  INVALID(join(long_name, 0, 1, kMs, &seat), "x\" and so on, 99999 bytes; 1 to 64");
  CHECK(strlen(lowlat_dispatch_last_error()) < 200);
  INVALID(join("a", 0, 0, kMs, &seat), "tp_size is 0; a vote needs 1 to 64");
  INVALID(join("a", 0, 65, kMs, &seat), "tp_size is 65; a vote needs 1 to 64");
  INVALID(join("a", 2, 2, kMs, &seat), "tp_rank is 2; it must be below tp_size, 2");
  INVALID(join("a", 0xffffffffu, 2, kMs, &seat), "it must be below tp_size, 2");
  INVALID(join("a", 0, 1, 0, &seat), "budget is 0 ns; it must be longer than 0");
  INVALID(join("a", 0, 1, kPatienceNs + 2 * kMs, &seat), "must be shorter than the engine budget");
  ladder.plugin_ns = ladder.kernel_ns;
  INVALID(lowlat_group_join("a", 0, 1, &ladder, kMs, &seat), "shorter than the plugin budget");
  CHECK(seat == NULL);
}

struct waiter {
  const char* name;
  lowlat_dispatch_status status;
};

static void* wait_for_a_group(void* argument) {
  struct waiter* waiter = argument;
  lowlat_seat* seat = NULL;
  waiter->status = join(waiter->name, 0, 2, 2000 * kMs, &seat);
  return NULL;
}

static void a_rank_has_a_number_of_its_own(void) {
  struct waiter waiter = {group_name("number"), LOWLAT_DISPATCH_STATUS_OK};
  lowlat_seat* seat = NULL;
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_for_a_group, &waiter) == 0);
  /* Whoever is first waits for rank 1; the other has the number twice. */
  const lowlat_dispatch_status second = join(waiter.name, 0, 2, 2000 * kMs, &seat);
  CHECK(pthread_join(thread, NULL) == 0);
  const lowlat_dispatch_status status = waiter.status;
  CHECK((status == LOWLAT_DISPATCH_STATUS_FAULT) + (second == LOWLAT_DISPATCH_STATUS_FAULT) == 1);
  CHECK((status == LOWLAT_DISPATCH_STATUS_DECLINE) + (second == LOWLAT_DISPATCH_STATUS_DECLINE) ==
        1);
  CHECK(seat == NULL);
}

static void the_name_of_a_living_group_is_refused_and_of_a_dead_one_taken(void) {
  const char* name = group_name("name");
  lowlat_seat* seat = NULL;
  lowlat_seat* other = NULL;
  /* Its only rank died without leaving. */
  CHECK(exit_status(fork_rank(name, 0, 1, 1)) == 1);
  OK(join(name, 0, 1, kPatienceNs, &seat));
  DECLINE(join(name, 0, 1, 20 * kMs, &other), "[117] group capi-name-");
  CHECK(strstr(lowlat_dispatch_last_error(), "a living group of 1 has this name") != NULL);
  CHECK(lowlat_dispatch_last_reason() == LOWLAT_REASON_GROUP_IN_USE);
  OK(lowlat_seat_destroy(seat));
  OK(join(name, 0, 1, kPatienceNs, &other));
  OK(lowlat_seat_destroy(other));
}

static void shared_memory_that_cannot_be_had_is_a_decline(void) {
  const char* name = group_name("full");
  lowlat_seat* seat = NULL;
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const struct rlimit none = {16, limit.rlim_max};
  /* The limit's signal, which would end this process, does not come. */
  CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
  DECLINE(join(name, 0, 1, kPatienceNs, &seat), "[118] group capi-full-");
  CHECK(strstr(lowlat_dispatch_last_error(), "may write files of at most 16 bytes") != NULL);
  CHECK(seat == NULL && setrlimit(RLIMIT_FSIZE, &limit) == 0);
  /* Nothing is left behind that would be in the way. */
  OK(join(name, 0, 1, kPatienceNs, &seat));
  OK(lowlat_seat_destroy(seat));
}

/* What a forked child does with its copy of a seat is not the rank's doing. */
static void a_child_that_frees_its_copy_leaves_no_group(void) {
  const char* name = group_name("copy");
  lowlat_seat* seat = NULL;
  OK(join(name, 0, 1, kPatienceNs, &seat));
  const pid_t pid = fork();
  if (pid == 0) _exit(lowlat_seat_destroy(seat) == LOWLAT_DISPATCH_STATUS_OK ? 0 : 1);
  CHECK(exit_status(pid) == 0);
  lowlat_seat* other = NULL;
  DECLINE(join(name, 0, 1, 20 * kMs, &other), "[117] group capi-copy-");
  OK(lowlat_seat_agree_step(seat, 1, kPatienceNs));
  OK(lowlat_seat_destroy(seat));
}

/* Address space that is used up: the file that was made for the memory goes again. */
static void memory_that_cannot_be_mapped_leaves_no_file(void) {
  const char* name = group_name("space");
  const pid_t pid = fork();
  if (pid == 0) {
    const struct rlimit none = {4096, RLIM_INFINITY};
    lowlat_seat* seat = NULL;
    if (setrlimit(RLIMIT_AS, &none) != 0) _exit(1);
    const int declined = join(name, 0, 1, kPatienceNs, &seat) == LOWLAT_DISPATCH_STATUS_DECLINE;
    _exit(declined && lowlat_dispatch_last_reason() == LOWLAT_REASON_SHARED_MEMORY ? 0 : 2);
  }
  CHECK(exit_status(pid) == 0);
  char path[128];
  snprintf(path, sizeof path, "/dev/shm/lowlat-%s", name);
  CHECK(access(path, F_OK) != 0);
}

int main(void) {
  processes_vote();
  coverage_is_voted();
  arguments_are_checked();
  the_name_of_a_living_group_is_refused_and_of_a_dead_one_taken();
  shared_memory_that_cannot_be_had_is_a_decline();
  memory_that_cannot_be_mapped_leaves_no_file();
  a_child_that_frees_its_copy_leaves_no_group();
  /* Threads last: a process that forks has none. */
  a_rank_has_a_number_of_its_own();
  CHECK(lowlat_dispatch_num_handles() == 0);
  return closing();
}
