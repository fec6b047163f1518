// Users of the system, for messages.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

namespace deltasync {

/// "user 65534 (nobody)"; without the name where the system knows none.
std::string describe_user(uid_t uid);
/// " (it belongs to user 65534 (nobody))" if `file` is another user's than this process; else empty.
std::string describe_stranger(const std::filesystem::path& file);

}  // namespace deltasync
