// The token of an agent that was given none: it makes one, and lets programs of its own user on its own host find it.
//
// The token lies in a file of mode 0600 in the user's runtime directory (base/runtime_dir.hpp), which is named by the
// address that the agent listens on and the network namespace of that. The agent holds a lock on the file as long as it
// lives. What has no lock on it was left by an agent that was killed: nobody reads it, and the next agent that starts
// removes it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/fd.hpp"
#include "deltasync/result.hpp"
#include "net/endpoint.hpp"

namespace deltasync::net {

/// 32 random bytes in hexadecimal.
std::string make_token();

/// Lies there as long as it lives. Movable.
class LocalToken {
 public:
  /// `at` is the address that was bound, in numbers. already_exists if another lives there,
  /// permission, io, no_space; names the file.
  static Result<LocalToken> publish(const Endpoint& at, std::string_view token);
  LocalToken(LocalToken&&) noexcept = default;
  LocalToken& operator=(LocalToken&&) = delete;
  /// Takes the file away, if it is still this one's.
  ~LocalToken();

  const std::filesystem::path& file() const noexcept { return file_; }

 private:
  LocalToken(UniqueFd dir, UniqueFd fd, std::filesystem::path file)
      : dir_(std::move(dir)), fd_(std::move(fd)), file_(std::move(file)) {}
  UniqueFd dir_;  ///< with a shared lock: cleaners of /tmp (systemd-tmpfiles) pass such a directory by
  UniqueFd fd_;   ///< with the lock that says: it lives
  std::filesystem::path file_;
};

/// The token of the agent at the other end of a connected TCP socket, if it is on a loopback address of this host,
/// lives, and is this user's; else empty. An error only if there is one that cannot be read, or `connection` where the
/// connection has ended.
Result<std::string> find_local_token(int connection);

}  // namespace deltasync::net
