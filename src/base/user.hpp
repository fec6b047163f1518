// Users of the system, for messages.
#pragma once

#include <sys/types.h>

#include <string>

namespace deltasync {

/// "user 65534 (nobody)"; without the name where the system knows none.
std::string describe_user(uid_t uid);

}  // namespace deltasync
