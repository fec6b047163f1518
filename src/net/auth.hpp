// The token handshake: both sides prove that they know the same secret without sending it. Each proof covers fresh
// nonces of both sides and the direction, so that a recorded or reflected one is worth nothing. Needs no Boost.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync::net {

using Nonce = std::array<std::uint8_t, 32>;
using Proof = std::array<std::uint8_t, 32>;

inline constexpr std::size_t kTokenFileBytesMax = 4096;
inline constexpr std::size_t kTokenBytesMin = 16;  ///< a shorter one can be guessed from one recorded handshake

/// 32 bytes from the system's random source.
Nonce make_nonce();
/// A random non-zero word, for instance and plan ids.
std::uint64_t make_random_id();

/// HMAC-SHA256(token, "deltasync-client-1" ‖ server nonce ‖ client nonce ‖ role). All zero without a token.
Proof client_proof(std::string_view token, const Nonce& server_nonce, const Nonce& client_nonce, wire::Role role);
/// HMAC-SHA256(token, "deltasync-server-1" ‖ client nonce ‖ server nonce). All zero without a token.
Proof server_proof(std::string_view token, const Nonce& client_nonce, const Nonce& server_nonce);
/// In a time that does not depend on where they differ.
bool equal_proofs(const Proof& a, const Proof& b) noexcept;

/// invalid_argument if it has fewer than kTokenBytesMin bytes: for callers that listen with it.
Status check_token(std::string_view token);
/// The secret in a file: at most kTokenFileBytesMax bytes, surrounding white space dropped, then check_token().
/// `permission` if group or others may touch the file or it belongs to another user; every error names the path. A file
/// of root's may be read by a group: so comes a secret that Kubernetes mounts.
Result<std::string> read_token_file(const std::filesystem::path& path);
/// The same of an open file; `path` is for messages.
Result<std::string> read_token(int fd, const std::filesystem::path& path);

}  // namespace deltasync::net
