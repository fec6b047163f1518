// A listening Unix socket, claimed so that no two processes have one path.
#pragma once

#include <string>

#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync::net {

/// Who listens, for messages: "another agent answers on …: …, or give this one another --socket".
struct ListenerWords {
  std::string who = "agent";
  std::string remedy = "another --socket";
};

/// A listening, non-blocking socket at `path` with mode 0600. A socket file that nobody answers on is replaced;
/// already_exists if somebody does, or if the file is no socket.
Result<UniqueFd> listen_unix(const std::string& path, const ListenerWords& words = {});

}  // namespace deltasync::net
