#include "base/cpu_list.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>

namespace deltasync {
namespace {

std::optional<unsigned> number_in(std::string_view text) {
  unsigned number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || number >= kCpusMax) return std::nullopt;
  return number;
}

}  // namespace

Result<CpuList> parse_cpu_list(std::string_view text) {
  std::vector<bool> named(kCpusMax, false);
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const std::size_t dash = part.find('-');
    const auto first = number_in(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : number_in(part.substr(dash + 1));
    if (!first || !last || *last < *first) {
      return Error(Errc::invalid_argument, "'" + std::string(text) + "' is no list of numbers below " +
                                               std::to_string(kCpusMax) + " such as 0-7,16");
    }
    std::fill(named.begin() + *first, named.begin() + *last + 1, true);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  CpuList cpus;
  for (unsigned cpu = 0; cpu < kCpusMax; ++cpu) {
    if (named[cpu]) cpus.push_back(cpu);
  }
  return cpus;
}

std::string to_string(const CpuList& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus[i]);
    if (end - i > 1) text += '-' + std::to_string(cpus[end - 1]);
    i = end;
  }
  return text;
}

bool contains(const CpuList& cpus, unsigned cpu) {
  return std::binary_search(cpus.begin(), cpus.end(), cpu);
}

}  // namespace deltasync
