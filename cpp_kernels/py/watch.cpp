#include "py/watch.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

namespace lowlat::py_face {
namespace {

// Far below the time in which a fault has to become the server's end, and one read of a few words.
constexpr std::chrono::milliseconds kInterval{5};

std::string line_of(const std::string& text, std::uint32_t number) {
  std::size_t begin = 0;
  for (; number > 0; --number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return "";
    begin = end + 1;
  }
  return text.substr(begin, text.find('\n', begin) - begin);
}

// See lowlat_status_words.place.
std::string words_of_place(std::uint32_t place) {
  if (place == 0) return "";
  const bool is_gate = (place & LOWLAT_PLACE_GATE) != 0;
  const std::uint32_t number = place & ~LOWLAT_PLACE_GATE;
  const std::uint32_t each = is_gate ? LOWLAT_PLACE_GATES : LOWLAT_PLACE_KERNELS;
  const std::string what =
      (is_gate ? ", gate " : ", kernel ") + std::to_string(number % each) + " of ";
  if (number < each) return what + "the step's begin";
  return what + "layer " + std::to_string(number / each - 1);
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

// Why the text is not whole in the file, or "".
std::string write_all(int file, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::strerror(errno);
    done += static_cast<std::size_t>(count);
  }
  return "";
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

std::string words_of_fault(const lowlat_status_words& status, const std::string& catalogue,
                           int rank) {
  const std::string kernel = line_of(catalogue, status.kernel);
  const std::string name = kernel.empty() ? "unknown" : kernel.substr(0, kernel.find(' '));
  const std::string peer = "rank " + std::to_string(status.peer);
  const std::string stage = lowlat_stage_name(status.stage);
  std::string out = "lowlat: rank " + std::to_string(rank);
  switch (status.state) {
    case 1: out += " waited in vain for " + peer; break;
    case 2: out += " was ended by " + peer; break;
    case 3: out += " was aborted"; break;
    default: out += " is in state " + std::to_string(status.state);
  }
  // The stage of a launch that was ended before it began.
  out += stage == "none" ? " between two launches" : " in " + stage + " of " + name;
  return out + words_of_place(status.place) + ", exchange " + std::to_string(status.epoch) +
         "; its rows are NaN and the server stops";
}

Watch::Watch(const lowlat_model* model, int rank, std::string about, std::string path,
             pid_t stop_pid, std::chrono::milliseconds grace)
    : model_(model),
      rank_(rank),
      catalogue_(lowlat_model_catalogue(model)),
      about_(std::move(about)),
      path_(std::move(path)),
      stop_pid_(stop_pid),
      stops_parent_(stop_pid == ::getppid()),
      grace_(grace),
      thread_([this] { run(); }) {}

Watch::~Watch() { stop(); }

void Watch::set_about(std::string about) {
  const std::lock_guard lock(mutex_);
  about_ = std::move(about);
}

void Watch::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return stopped_; })) {
    lowlat_status_words status{};
    status.struct_bytes = sizeof status;
    if (lowlat_status_read(model_, &status) != LOWLAT_OK || status.state == 0) continue;
    report(status);
    stop_server(lock);
    return;
  }
}

void Watch::report(const lowlat_status_words& status) {
  const std::string words = words_of_fault(status, catalogue_, rank_);
  const std::string text =
      "{\"format\": 1, \"time\": " + quoted(utc_now()) + ", \"rank\": " + std::to_string(rank_) +
      ", \"words\": " + quoted(words) +
      ",\n \"status\": {\"state\": " + std::to_string(status.state) +
      ", \"kernel\": " + std::to_string(status.kernel) +
      ", \"stage\": " + quoted(lowlat_stage_name(status.stage)) +
      ", \"peer\": " + std::to_string(status.peer) +
      ", \"place\": " + std::to_string(status.place) +
      ", \"epoch\": " + std::to_string(status.epoch) + "},\n \"about\": " + about_ + "}\n";
  const int file =
      ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  std::string why = file < 0 ? std::strerror(errno) : write_all(file, text);
  if (file >= 0 && ::close(file) != 0 && why.empty()) why = std::strerror(errno);
  write_all(STDERR_FILENO, words +
                               (why.empty() ? " (post-mortem: " + path_ + ")"
                                            : " (no post-mortem at " + path_ + ": " + why + ")") +
                               "\n");
  seen_.store(true, std::memory_order_release);
}

void Watch::stop_server(std::unique_lock<std::mutex>& lock) {
  if (!signal_server(SIGQUIT) || grace_.count() == 0) return;
  if (wake_.wait_for(lock, grace_, [this] { return stopped_; })) return;
  // Its children end with it, and this process in any case: a launcher that is its container's
  // first process cannot be killed from inside.
  signal_server(SIGKILL);
  ::kill(::getpid(), SIGKILL);
}

bool Watch::signal_server(int number) const {
  // A parent that has gone since may have left its number to somebody else.
  if (stop_pid_ <= 0 || (stops_parent_ && ::getppid() != stop_pid_)) return false;
  return ::kill(stop_pid_, number) == 0;
}

}  // namespace lowlat::py_face
