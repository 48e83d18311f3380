// exchange_hopper: checks the exchange of partial sums between two GPUs, published from
// the output projection and received by the kernel that sums, mixes and norms. TP2's share of a
// V4.1-Flash layer.
//
//   exchange_hopper check       one process, devices 0 and 1: results against float64, ranks
//                               bitwise equal, a slow rank, a rank that never comes
//   exchange_hopper processes   the same by two processes that exchange handles
// measure_exchange.cu times it.
//
// Exit code 1: a failure.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/exchange_pair.hpp"
#include "reference/hc.hpp"

namespace lowlat::bench {
namespace {

int failures = 0;

void report(bool good, const char* what) {
  failures += good ? 0 : 1;
  std::printf("%s %s\n", good ? "ok  " : "FAIL", what);
  std::fflush(stdout);
}

void check_pair(int rows) {
  Pair pair(rows, 1);
  // The partial sums alone, for float64.
  std::vector<double> sum;
  for (int r = 0; r < kRanks; ++r) {
    cuda_must(cudaSetDevice(r), "set device");
    pair.ranks[r]->launch(false, false, false, nullptr);
    cuda_must(cudaDeviceSynchronize(), "synchronize");
    const std::vector<float> partial = pair.ranks[r]->act.partial.take();
    sum.resize(partial.size());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
  }
  for (const bool early : {false, true}) {
    pair.capture(true, true, early);
    int different = 0, faults = 0;
    std::vector<std::uint16_t> first;
    for (int i = 0; i < 300; ++i) {
      for (int r = 0; r < kRanks; ++r) {
        // Now and then a rank is late by a millisecond.
        if (i % 50 == 10 && r == i / 50 % 2) usleep(1000);
        cuda_must(cudaSetDevice(r), "set device");
        pair.ranks[r]->begin();
      }
      std::vector<std::uint16_t> x[kRanks];
      for (int r = 0; r < kRanks; ++r) {
        cuda_must(cudaSetDevice(r), "set device");
        pair.ranks[r]->graph->wait();
        x[r] = pair.ranks[r]->act.residual[1].take();
        const auto more = pair.ranks[r]->act.x.take();
        x[r].insert(x[r].end(), more.begin(), more.end());
        faults += pair.ranks[r]->status()[0] != 0 ? 1 : 0;
      }
      if (i == 0) first = x[0];
      if (x[0] != x[1] || x[0] != first) {
        ++different;
        std::printf("replay %d: ranks %s, rank 0 %s the first replay\n", i,
                    x[0] == x[1] ? "equal" : "differ", x[0] == first ? "as" : "not as");
      }
    }
    report(different == 0 && faults == 0,
           early ? "300 replays, ranks bitwise equal, early" : "300 replays, ranks bitwise equal");
  }
  // Against float64.
  cuda_must(cudaSetDevice(0), "set device");
  const Rank& rank = *pair.ranks[0];
  const std::vector<float> mix = rank.act.mix.take();
  const std::vector<std::uint16_t> got = rank.act.residual[1].take();
  double difference = 0.0, size = 0.0;
  for (int row = 0; row < rows; ++row) {
    std::vector<std::uint16_t> y(kHidden), want(4 * kHidden);
    for (int i = 0; i < kHidden; ++i) y[i] = bf16(sum[static_cast<std::size_t>(row) * kHidden + i]);
    reference::hc_post(want.data(), &rank.residual[static_cast<std::size_t>(row) * 4 * kHidden],
                       y.data(), &mix[static_cast<std::size_t>(row) * fused::kMixStride + 4],
                       &mix[static_cast<std::size_t>(row) * fused::kMixStride + 8], 1, kHidden);
    for (int i = 0; i < 4 * kHidden; ++i) {
      const double a = reference::from_bf16(got[static_cast<std::size_t>(row) * 4 * kHidden + i]);
      const double b = reference::from_bf16(want[i]);
      difference += (a - b) * (a - b);
      size += b * b;
    }
  }
  const double error = std::sqrt(difference / size);
  std::printf("T=%d rel_l2 of the residual %.2e\n", rows, error);
  report(error <= 4e-3, "residual against float64");
}

// A rank that never comes: the other says whom it waited for; the late one leaves at once.
void check_missing_rank() {
  Pair pair(12, 2);
  pair.capture(true, true, true);
  cuda_must(cudaSetDevice(0), "set device");
  pair.ranks[0]->begin();
  pair.ranks[0]->graph->wait();
  const std::uint32_t* words = pair.ranks[0]->status();
  report(words[0] == 1u && words[2] == 3u && words[3] == 1u, "a missing rank is named");
  cuda_must(cudaSetDevice(1), "set device");
  cudaEvent_t begin, end;
  cuda_must(cudaEventCreate(&begin), "event");
  cuda_must(cudaEventCreate(&end), "event");
  // Its peer has sent the first exchange and gone: the second ends by the abort word.
  cuda_must(cudaEventRecord(begin, pair.ranks[1]->graph->stream()), "record");
  pair.ranks[1]->begin();
  cuda_must(cudaEventRecord(end, pair.ranks[1]->graph->stream()), "record");
  pair.ranks[1]->graph->wait();
  float ms = 0.0f;
  cuda_must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
  const auto x = pair.ranks[1]->act.x.take();
  std::printf("late rank: state %u after %.3f ms\n", pair.ranks[1]->status()[0], ms);
  report(ms < 100.0f, "the late rank ends before its own budget");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// Everything or nothing through a socket; the other side may be gone.
bool send_all(int socket, const void* data, std::size_t bytes) {
  return write(socket, data, bytes) == static_cast<ssize_t>(bytes);
}
bool receive_all(int socket, void* data, std::size_t bytes) {
  std::size_t have = 0;
  while (have < bytes) {
    const ssize_t got = read(socket, static_cast<char*>(data) + have, bytes - have);
    if (got <= 0) return false;
    have += static_cast<std::size_t>(got);
  }
  return true;
}

// One rank of the two-process form. The socket's receive budget is its deadline.
int run_process(int tp_rank, int socket) {
  const timeval budget{30, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &budget, sizeof budget);
  cuda_must(cudaSetDevice(tp_rank), "set device");
  Rank rank(tp_rank, 12, 4);
  const lowlat_peer_handle own = rank.region.handle();
  lowlat_peer_handle other;
  char word = 1;
  bool good = send_all(socket, &own, sizeof own) && receive_all(socket, &other, sizeof other);
  if (!good) return 1;
  rank.region.open(1 - tp_rank, other);
  rank.region.probe(1 - tp_rank);
  good = send_all(socket, &word, 1) && receive_all(socket, &word, 1);
  rank.region.probed_by(1 - tp_rank, kBudgetNs);
  rank.capture(true, true, true);
  std::vector<std::uint16_t> peer_x(rank.act.x.size());
  int different = 0;
  for (int i = 0; i < 200 && good; ++i) {
    rank.begin();
    rank.graph->wait();
    const auto x = rank.act.x.take();
    good = send_all(socket, x.data(), 2 * x.size()) &&
           receive_all(socket, peer_x.data(), 2 * x.size());
    different += x != peer_x ? 1 : 0;
  }
  std::printf("%s rank %d of two processes: 200 replays, %d differ, state %u\n",
              good && different == 0 && rank.status()[0] == 0 ? "ok  " : "FAIL", tp_rank, different,
              rank.status()[0]);
  std::fflush(stdout);
  // Nobody unmaps what the other still uses.
  good = good && send_all(socket, &word, 1) && receive_all(socket, &word, 1);
  return good && different == 0 && rank.status()[0] == 0 ? 0 : 1;
}

int run_processes() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 3;
  const pid_t child = fork();
  if (child < 0) return 3;
  close(sockets[child == 0 ? 0 : 1]);
  const int code = run_process(child == 0 ? 1 : 0, sockets[child == 0 ? 1 : 0]);
  if (child == 0) _exit(code);
  int status = 0;
  waitpid(child, &status, 0);
  return code != 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0 ? 1 : 0;
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // a run that is killed shows where it stood
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "processes") return run_processes();  // forks before CUDA begins
  if (what == "check") {
    for (const int rows : {12, 48}) check_pair(rows);
    check_missing_rank();
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
  }
  std::fprintf(stderr, "usage: exchange_hopper check | processes\n");
  return 2;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
