// The directory in which programs of one user find each other on a host: sockets, and small files with secrets. Nobody
// else can write or read there. It is the first of these that can be had:
//
//   $XDG_RUNTIME_DIR/deltasync     if that directory is this user's
//   /run/user/UID/deltasync        likewise; for a program that was started without that variable
//   /tmp/deltasync-UID
#pragma once

#include <filesystem>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync {

/// Made with mode 0700 if it is not there yet. permission if what is there is not this user's alone: names it, its
/// owner and the remedy.
Result<std::filesystem::path> make_runtime_dir();
/// All of them that are there and this user's alone, since who is to be found may have had another environment.
std::vector<std::filesystem::path> find_runtime_dirs();

}  // namespace deltasync
