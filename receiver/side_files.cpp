#include "receiver/side_files.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace deltasync::receiver {
namespace {

bool same_file(const Sidecar::File& a, const Sidecar::File& b) {
  return a.bytes == b.bytes && a.tensors == b.tensors;
}

/// Names of files that only one of them has, or that differ.
void add_differences(const std::vector<Sidecar::File>& from, const std::vector<Sidecar::File>& to,
                     std::set<std::string>& names) {
  const auto find = [](const std::vector<Sidecar::File>& files, const std::string& name) {
    return std::find_if(files.begin(), files.end(), [&](const Sidecar::File& f) { return f.name == name; });
  };
  for (const Sidecar::File& file : from) {
    const auto other = find(to, file.name);
    if (other == to.end() || !same_file(file, *other)) names.insert(file.name);
  }
  for (const Sidecar::File& file : to) {
    if (find(from, file.name) == from.end()) names.insert(file.name);
  }
}

std::string differences(const Sidecar& from, const Sidecar& to) {
  constexpr std::size_t kNamesMax = 8;
  std::set<std::string> names;
  add_differences(from.weights, to.weights, names);
  add_differences(from.others, to.others, names);
  std::string text;
  std::size_t listed = 0;
  for (const std::string& name : names) {
    if (listed++ == kNamesMax) return text + " and " + std::to_string(names.size() - kNamesMax) + " more";
    text += (text.empty() ? "" : ", ") + name;
  }
  return text.empty() ? "their order" : text;
}

}  // namespace

Status check_same_files(const Sidecar& held, const Sidecar& now) {
  if (now.encode() == held.encode()) return {};
  return Error(Errc::layout_mismatch,
               "side files changed (" + differences(held, now) + "): connect again and bind a new target");
}

}  // namespace deltasync::receiver
