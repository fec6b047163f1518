#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

volatile std::sig_atomic_t g_stop = 0;

void on_stop_signal(int) {
  g_stop = 1;
}

std::atomic<int> g_received = 0;

constexpr int kStopSignals[] = {SIGINT, SIGTERM};

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kStopSignals) sigaddset(&set, signal);
  return set;
}

}  // namespace

void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESETHAND;  // the second signal has its default effect; no SA_RESTART, so that poll returns
  sigemptyset(&action.sa_mask);
  for (const int signal : kStopSignals) sigaction(signal, &action, nullptr);
}

bool stop_requested() noexcept {
  return g_stop != 0;
}

// ---- StopOnSignal --------------------------------------------------------------------------------------------

Result<std::unique_ptr<StopOnSignal>> StopOnSignal::make(pid_t end_with) {
  std::optional<ProcessWatch> watch;
  if (end_with != 0) {
    DS_ASSIGN(const ProcessId id, ProcessId::of(end_with).with_context("--end-with"));
    DS_ASSIGN(watch, ProcessWatch::open(id).with_context("--end-with"));
  }
  const sigset_t set = stop_signals();
  UniqueFd signals(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals) return Error::from_errno("signalfd", errno);
  UniqueFd end(::eventfd(0, EFD_CLOEXEC));
  if (!end) return Error::from_errno("eventfd", errno);
  Dispositions before;
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, &before.mask); error != 0) {
    return Error::from_errno("pthread_sigmask", error);
  }
  // A shell starts background jobs with SIGINT ignored: the second one would not end this process.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < std::size(kStopSignals); ++i) {
    ::sigaction(kStopSignals[i], &action, &before.actions[i]);
  }
  try {
    return std::unique_ptr<StopOnSignal>(
        new StopOnSignal(std::move(signals), std::move(end), std::move(watch), before));
  } catch (const std::system_error& e) {
    before.restore();
    return Error(Errc::no_space, "the thread that waits for signals: " + e.code().message());
  }
}

void StopOnSignal::Dispositions::restore() const noexcept {
  for (std::size_t i = 0; i < std::size(kStopSignals); ++i) ::sigaction(kStopSignals[i], &actions[i], nullptr);
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
}

StopOnSignal::StopOnSignal(UniqueFd signals, UniqueFd end, std::optional<ProcessWatch> end_with,
                           const Dispositions& before)
    : signals_(std::move(signals)),
      end_(std::move(end)),
      end_with_(std::move(end_with)),
      before_(before),
      thread_([this] { listen(); }) {}

StopOnSignal::~StopOnSignal() {
  ended_.release();
  ::eventfd_write(end_.get(), 1);
  thread_.join();
  before_.restore();
}

int StopOnSignal::received() noexcept {
  return g_received;
}

void StopOnSignal::listen() {
  set_thread_name("ds-signals");
  for (;;) {
    pollfd items[] = {
        {signals_.get(), POLLIN, 0}, {end_.get(), POLLIN, 0}, {end_with_ ? end_with_->fd() : -1, POLLIN, 0}};
    const int ready = ::poll(items, std::size(items), -1);
    if (ready > 0 && items[1].revents != 0) return;
    if (ready > 0 && items[2].revents != 0) {
      g_received = SIGTERM;
      stop_.request_stop();
      break;
    }
    signalfd_siginfo info{};
    const ssize_t n = ready > 0 ? ::read(signals_.get(), &info, sizeof info) : -1;
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n == sizeof info) {
      g_received = static_cast<int>(info.ssi_signo);
      stop_.request_stop();
    } else {
      log::warn("cannot_wait_for_signals errno={} effect=\"the next one ends the process at once\"", errno);
    }
    break;
  }
  // From here on a signal has its default effect: on this thread, which is the only one that lets it through.
  const sigset_t set = stop_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  ended_.acquire();
}

bool wait_readable(int fd, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (!stop_requested()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    pollfd item{fd, POLLIN, 0};
    // Slices bound what a signal that arrives just before poll() can cost.
    const int ready = ::poll(&item, 1, static_cast<int>(std::min<long long>(left, 200)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
  return false;
}

}  // namespace deltasync::cli
