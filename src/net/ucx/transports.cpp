#include "net/ucx/transports.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace deltasync::net::ucx {
namespace {

struct Several {
  std::string_view name;
  std::array<std::string_view, 6> of;
};
/// As UCX_TLS has them.
constexpr Several kSeveral[] = {
    {"sm", {"posix", "sysv", "xpmem", "cma", "knem"}},
    {"shm", {"posix", "sysv", "xpmem", "cma", "knem"}},
    {"mm", {"posix", "sysv", "xpmem"}},
    {"ib", {"rc", "ud", "dc", "srd"}},
    {"cuda", {"cuda", "gdr"}},
};

bool is_or_begins(std::string_view transport, std::string_view name) {
  return !name.empty() && transport.starts_with(name) &&
         (transport.size() == name.size() || transport[name.size()] == '_');
}

}  // namespace

Result<std::vector<std::string>> parse_transports(std::string_view list) {
  std::vector<std::string> names;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (comma == 0 || comma + 1 == list.size()) {
      return Error(Errc::invalid_argument,
                   "DELTASYNC_UCX_TRANSPORTS: names of transports with commas between them, such as \"rc,cuda\"");
    }
    names.emplace_back(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return names;
}

bool is_wanted(std::string_view transport, const std::vector<std::string>& wanted) {
  return std::any_of(wanted.begin(), wanted.end(), [&](const std::string& name) {
    if (is_or_begins(transport, name)) return true;
    return std::any_of(std::begin(kSeveral), std::end(kSeveral), [&](const Several& several) {
      return several.name == name && std::any_of(several.of.begin(), several.of.end(),
                                                 [&](std::string_view one) { return is_or_begins(transport, one); });
    });
  });
}

Error not_wanted(const std::string& transport, const std::vector<std::string>& wanted) {
  std::string names;
  for (const std::string& name : wanted) names += (names.empty() ? "" : ",") + name;
  return {Errc::unsupported, "UCX uses " + transport + " here, and DELTASYNC_UCX_TRANSPORTS allows only " + names +
                                 ": see which UCX has with UCX_TLS=" + names +
                                 " UCX_LOG_LEVEL=info, or allow this one too"};
}

void add_names(std::string& all, std::string_view more) {
  while (!more.empty()) {
    const std::string_view name = more.substr(0, more.find(','));
    more.remove_prefix(std::min(name.size() + 1, more.size()));
    if (("," + all + ",").find("," + std::string(name) + ",") != std::string::npos) continue;
    all += all.empty() ? "" : ",";
    all += name;
  }
}

}  // namespace deltasync::net::ucx
