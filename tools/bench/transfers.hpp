// Plain transfers over loopback: what sockets allow, measured beside the pulls.
#pragma once

#include <cstdint>
#include <span>

#include "deltasync/result.hpp"

namespace deltasync::bench {

/// How the bytes of a file get into a socket.
enum class SendBy : std::uint8_t {
  sendfile,
  send,      ///< of the mapped file
  zerocopy,  ///< the same with MSG_ZEROCOPY, which loopback copies after all
  splice,    ///< by a pipe
};

/// What is done with the bytes that have come.
enum class OnPiece : std::uint8_t {
  nothing,
  digest,  ///< of each piece of 256 KiB, as long as it is in a cache: the least that a verified pull has to do besides
};

/// Seconds that it takes to move [offset, offset + to.size()) of `file` into `to`: a forked sender, `streams`
/// connections, one receiving thread each. unsupported: this kernel cannot send so.
Result<double> transfer_once(int file, std::uint64_t offset, std::span<std::byte> to, unsigned streams,
                             SendBy by = SendBy::sendfile, OnPiece on_piece = OnPiece::nothing);

}  // namespace deltasync::bench
