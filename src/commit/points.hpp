// Named instants of coordinator and rank, for tests that kill or stop a process there.
#pragma once

#include <functional>
#include <string>

namespace deltasync::commit {

/// Called at each instant with its name; empty: nobody looks. Coordinator: "log KIND", "logged KIND", "order KIND".
/// Rank: "work KIND", "worked KIND", "report PHASE", "ordered KIND".
using Points = std::function<void(const std::string&)>;

inline void at(const Points& points, const char* what, std::string_view kind) {
  if (points) points(std::string(what) + " " + std::string(kind));
}

}  // namespace deltasync::commit
