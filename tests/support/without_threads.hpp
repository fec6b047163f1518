// What a library does where no thread is to be had.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <system_error>
#include <thread>

namespace deltasync::test {

inline constexpr int kThreadsNotLimited = 77;

/// The exit code of a child process that ran `body` and could not start a thread; kThreadsNotLimited where there is no
/// way to forbid it. In a child, as nobody: the limit counts the threads of a user, and does not bind root.
/// (A limit of address space would do for root too, but would let allocations fail as well.)
inline int run_without_threads(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) ::_exit(kThreadsNotLimited);
    const rlimit none{0, 0};
    if (::setrlimit(RLIMIT_NPROC, &none) != 0) ::_exit(kThreadsNotLimited);
    try {
      std::thread([] {}).join();
      ::_exit(kThreadsNotLimited);
    } catch (const std::system_error&) {
    }
    try {
      ::_exit(body());
    } catch (const std::exception&) {
      ::_exit(90);
    }
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace deltasync::test
