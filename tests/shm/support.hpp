// Segments in a directory of their own, and writer processes that a test can kill and stop.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.hpp"
#include "shm/roles.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::shm::testing {

inline constexpr std::uint64_t kHalfBytes = 1u << 20;
inline constexpr std::uint64_t kBatches = 5;

using test::TempDir;

inline Digest128 some_digest() {
  Digest128 digest;
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) digest.bytes[i] = static_cast<std::uint8_t>(i + 1);
  return digest;
}

inline Result<std::unique_ptr<Segment>> create(const SegmentPath& path, std::uint64_t half_bytes = kHalfBytes) {
  return Segment::create(path, 1, {half_bytes, kBatches, some_digest()}, bytes_of(std::string_view("layout")),
                         bytes_of(std::string_view("the sidecar")));
}

inline Deadline in_ms(int ms) {
  return Deadline::after(std::chrono::milliseconds(ms));
}
/// Long enough for a loaded machine; a test that gets here has failed.
inline Deadline soon() {
  return in_ms(60'000);
}

inline Version version(std::uint64_t epoch, std::uint64_t number) {
  return {{epoch, number}, "step_" + std::to_string(number)};
}

inline ProcessWatch watch(pid_t pid) {
  return ProcessWatch::open(ProcessId::of(pid).value()).value();
}

/// A child process that runs `body` and exits with what it returns. Its end of a pipe pair lets both take turns.
class Child {
 public:
  struct Turns {
    int in;
    int out;
    void tell(char c) const {
      if (::write(out, &c, 1) != 1) ::_exit(90);
    }
    void expect(char wanted) const {
      char c = 0;
      if (::read(in, &c, 1) != 1 || c != wanted) ::_exit(91);
    }
  };

  explicit Child(const std::function<int(const Turns&)>& body) {
    int to[2], from[2];
    if (::pipe(to) != 0 || ::pipe(from) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(to[1]);
      ::close(from[0]);
      const Turns turns{to[0], from[1]};
      turns.expect('g');  // the parent has opened its watch and granted the slot
      ::_exit(body(turns));
    }
    ::close(to[0]);
    ::close(from[1]);
    parent_ = {from[0], to[1]};
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) kill();
    ::close(parent_.in);
    ::close(parent_.out);
  }

  pid_t pid() const { return pid_; }
  void go() const { ::write(parent_.out, "g", 1) == 1 ? void() : std::abort(); }
  void tell(char c) const { ASSERT_EQ(::write(parent_.out, &c, 1), 1); }
  void expect(char wanted) const {
    char c = 0;
    ASSERT_EQ(::read(parent_.in, &c, 1), 1);
    ASSERT_EQ(c, wanted);
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  void resume() const { ::kill(pid_, SIGCONT); }
  int exit_code() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  Turns parent_{-1, -1};
};

inline void fill_half(Segment& segment, unsigned half, std::uint8_t value) {
  std::memset(segment.half(half).data(), value, segment.half(half).size());
}
inline bool half_is(Segment& segment, unsigned half, std::uint8_t value) {
  for (const auto byte : segment.half(half)) {
    if (byte != std::byte{value}) return false;
  }
  return true;
}

}  // namespace deltasync::shm::testing
