// Where tests find a libucp, and what UCX itself reads from the environment.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace deltasync::test {

/// What DELTASYNC_UCX_LIBRARY names, else PyPI's libucx-cu12 in the environment of the Python tests
/// (tests/python/requirements.txt); empty: neither is there.
inline std::string find_ucx() {
  if (const char* const named = std::getenv("DELTASYNC_UCX_LIBRARY"); named != nullptr) return named;
  std::error_code ignored;
  for (const auto& python : std::filesystem::directory_iterator(DELTASYNC_PYTHON_VENV "/lib", ignored)) {
    const auto library = python.path() / "site-packages/libucx/lib/libucp.so.0";
    if (std::filesystem::exists(library, ignored)) return library.string();
  }
  return {};
}

inline constexpr const char* kNoUcx =
    "no libucp: tools/build_python.sh installs libucx-cu12, or name one in DELTASYNC_UCX_LIBRARY";

/// Set until its end. UCX reads them when it is opened.
class Environment {
 public:
  using Variable = std::pair<const char*, std::string>;
  Environment(std::initializer_list<Variable> variables) : variables_(variables) {
    for (const auto& [name, value] : variables_) ::setenv(name, value.c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : variables_) ::unsetenv(name);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const std::vector<Variable> variables_;
};

}  // namespace deltasync::test
