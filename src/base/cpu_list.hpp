// Sets of CPUs as Linux and its tools write them: "0-7,16".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync {

/// Ascending, each once.
using CpuList = std::vector<unsigned>;
inline constexpr unsigned kCpusMax = 8192;  ///< what Linux can be built for

/// Numbers and ranges, in any order. invalid_argument names what is wrong; an empty text is wrong.
Result<CpuList> parse_cpu_list(std::string_view text);
std::string to_string(const CpuList& cpus);

bool contains(const CpuList& cpus, unsigned cpu);

}  // namespace deltasync
