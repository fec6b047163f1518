#include "bench/processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <fstream>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"

extern char** environ;

namespace deltasync::bench {
namespace {

constexpr auto kStartLimit = std::chrono::seconds(20);

}  // namespace

Result<Child> Child::spawn(const std::vector<std::string>& argv, bool pipe) {
  int ends[2] = {-1, -1};
  if (pipe && ::pipe2(ends, O_CLOEXEC) != 0) return Error::from_errno("pipe", errno);
  std::vector<char*> args;
  args.reserve(argv.size() + 1);
  for (const auto& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  volatile int failed = 0;  // of the child, which shares this memory until it runs the program
  const pid_t parent = ::getpid();
  const pid_t pid = ::vfork();  // not fork(): the pages of a large model would be shared, and copied when written
  if (pid == 0) {
    // However this process ends, so does what it started.
    const bool tied = ::prctl(PR_SET_PDEATHSIG, SIGTERM) == 0 && ::getppid() == parent;
    if (tied && (!pipe || ::dup2(ends[1], STDOUT_FILENO) >= 0)) ::execve(args[0], args.data(), environ);
    failed = tied ? errno : ESRCH;
    ::_exit(127);
  }
  if (pid < 0) failed = errno;
  if (pipe) ::close(ends[1]);
  if (failed != 0) {
    if (pid > 0) ::waitpid(pid, nullptr, 0);
    if (pipe) ::close(ends[0]);
    return Error::from_errno("start " + argv[0], failed);
  }
  return Child(pid, ends[0]);
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), out_(std::exchange(other.out_, -1)), buffered_(std::move(other.buffered_)) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    stop();
    pid_ = std::exchange(other.pid_, -1);
    out_ = std::exchange(other.out_, -1);
    buffered_ = std::move(other.buffered_);
  }
  return *this;
}

Child::~Child() {
  stop();
}

void Child::stop() noexcept {
  if (out_ >= 0) ::close(std::exchange(out_, -1));
  if (pid_ <= 0) return;
  ::kill(pid_, SIGTERM);
  for (int i = 0; i < 1000; ++i) {
    if (::waitpid(pid_, nullptr, WNOHANG) != 0) {
      pid_ = -1;
      return;
    }
    ::usleep(10'000);
  }
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

Result<std::string> Child::read_line(Deadline deadline) {
  for (;;) {
    if (const auto end = buffered_.find('\n'); end != std::string::npos) {
      std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    pollfd p{out_, POLLIN, 0};
    const int ready = ::poll(&p, 1, static_cast<int>(deadline.remaining_ms().count()));
    if (ready == 0) return Error(Errc::timed_out, "no line from pid " + std::to_string(pid_));
    char chunk[4096];
    const ssize_t n = ready < 0 ? -1 : ::read(out_, chunk, sizeof(chunk));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Error(Errc::peer_died, "pid " + std::to_string(pid_) + " ended its output");
    buffered_.append(chunk, static_cast<std::size_t>(n));
  }
}

Status Child::wait_end(Deadline deadline) {
  for (;;) {
    const auto line = read_line(deadline);
    if (line) continue;
    if (line.error().code() == Errc::peer_died) return {};
    return line.error();
  }
}

Result<BenchAgent> BenchAgent::start(const Options& options) {
  std::string pattern = (std::filesystem::temp_directory_path() / "deltasync-bench-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) return Error::from_errno("mkdtemp " + pattern, errno);
  const std::filesystem::path dir = pattern;
  const auto ready = dir / "ready.json";
  std::vector<std::string> argv{(options.bin_dir / "deltasync-agent").string(),
                                "--name",
                                dir.filename().string(),
                                "--shm-dir",
                                options.shm_dir.string(),
                                "--socket",
                                (dir / "agent.sock").string(),
                                "--listen",
                                "127.0.0.1:0",
                                "--http",
                                "off",
                                "--ready-file",
                                ready.string(),
                                "--threads",
                                std::to_string(options.threads),
                                "--overlap-threads",
                                std::to_string(options.overlap_threads),
                                "--remove-segment-on-exit",
                                "--log-level",
                                "warn"};
  // What is measured is the compact form, however long this machine takes to make it.
  if (options.compact) argv.insert(argv.end(), {"--merge-wait-s", "1800"});
  if (options.tls.wanted()) {
    argv.insert(argv.end(), {"--tls-cert", options.tls.cert.string(), "--tls-key", options.tls.key.string()});
    argv.insert(argv.end(), {"--tls-kernel", options.tls.kernel ? "auto" : "off"});
  }
  if (!options.trace.empty()) argv.insert(argv.end(), {"--trace", trace_part(options, "agent").string()});
  DS_ASSIGN(Child child, Child::spawn(argv, false));
  BenchAgent agent(std::move(child), dir);
  const Deadline deadline = Deadline::after(kStartLimit);
  while (!std::filesystem::exists(ready)) {
    if (deadline.passed()) return Error(Errc::timed_out, "the agent did not get ready");
    if (::waitpid(agent.pid(), nullptr, WNOHANG) != 0) return Error(Errc::peer_died, "the agent ended at its start");
    ::usleep(2'000);
  }
  std::ifstream in(ready);
  const auto json = Json::parse(in, nullptr, false);
  if (json.is_discarded()) return Error(Errc::corrupt, ready.string());
  agent.endpoint_ = "127.0.0.1:" + std::to_string(json.at("port").get<unsigned>());
  return agent;
}

BenchAgent::~BenchAgent() {
  if (dir_.empty()) return;
  { const Child ended = std::move(child_); }  // the agent goes before its directory
  std::error_code ignored;
  std::filesystem::remove_all(dir_, ignored);
}

Result<double> process_cpu_s(pid_t pid) {
  clockid_t clock = 0;
  timespec at{};
  if (const int failed = ::clock_getcpuclockid(pid, &clock); failed != 0) {
    return Error::from_errno("CPU time of process " + std::to_string(pid), failed);
  }
  if (::clock_gettime(clock, &at) != 0) return Error::from_errno("CPU time of process " + std::to_string(pid), errno);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

std::uint64_t rss_anon_bytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/status");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoull(line.substr(8)) * 1024;
  }
  return 0;
}

RssSampler::RssSampler(pid_t pid)
    : thread_([this, pid] {
        set_thread_name("rss");
        while (!stop_) {
          peak_ = std::max(peak_.load(), rss_anon_bytes(pid));
          ::usleep(2'000);
        }
      }) {}

RssSampler::~RssSampler() {
  stop_ = true;
  thread_.join();
}

double monotonic_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace deltasync::bench
