// Whether newer versions come to an agent, by its page /v1/status: what `status` and `doctor` say of it.
#pragma once

#include <string>

#include "tools/cli/cli.hpp"

namespace deltasync::cli {

struct Standing {
  std::string found;
  std::string remedy;  ///< empty: all is well
};
/// Of a page that an agent has made; throws Json::exception if another program has.
Standing standing_of(const Json& page);

}  // namespace deltasync::cli
