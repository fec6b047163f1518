// deltasync-agent where the agent is in the file of `deltasync` (DELTASYNC_PORTABLE): starts that by this name.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

int main(int /*argc*/, char** argv) {
  char name[] = "deltasync-agent";
  argv[0] = name;
  std::error_code failed;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", failed).replace_filename("deltasync");
  ::execv(program.c_str(), argv);
  std::fprintf(stderr, "deltasync-agent: cannot start %s: %s; install the package again\n", program.c_str(),
               std::strerror(errno));
  return 1;
}
