// The trainer's end of a channel: tensors of a version go into a bucket, and when that is full into the other, while
// the engine takes them out of the first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/call_context.hpp"
#include "base/fork_guard.hpp"
#include "bucket/chunk.hpp"
#include "bucket/memory.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"
#include "net/blocking.hpp"

namespace deltasync::bucket {

struct SenderOptions {
  std::string socket = {};                    ///< the engine's: what follows "bucket:" of its endpoint
  std::uint32_t rank = 0;                     ///< among the processes that send to this engine
  std::uint32_t ranks = 1;                    ///< of them
  std::vector<wire::TileRange> tensors = {};  ///< that this one sends: ranges of layout indices; none: all
  std::uint64_t half_bytes = 256u << 20;      ///< of each of two buckets
  std::string name = "trainer";               ///< for the engine's messages
};

/// One thread calls it at a time. A version that fails leaves the channel closed; the next begin() opens it again.
class Sender {
 public:
  /// Makes the buckets and waits for an engine that listens.
  ///   - invalid_argument: ranks; a tensor's band that is larger than a bucket.
  ///   - permission: the engine is another user's. layout_mismatch, already_exists: what it says.
  ///   - no_space, timed_out, cancelled.
  static Result<std::unique_ptr<Sender>> open(LayoutPtr layout, const Sidecar& sidecar, SenderOptions options,
                                              const CallContext& until);
  /// Tells the engine that a version is given up. In a forked child it does nothing.
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  const Layout& layout() const noexcept { return *layout_; }
  const Share& share() const noexcept { return outgoing_.share(); }
  std::uint64_t half_bytes() const noexcept { return memory_->half_bytes(); }

  /// Of the version that the engine has, once it wants one; 0: it has none.
  Result<std::uint64_t> epoch_held(const CallContext& until);
  /// Begins a version, once the engine wants it.
  Status begin(const Version& version, const CallContext& until);
  /// Where the next bytes of a tensor go: `to.size()` of them, from byte `from` on. They are to be there at the next
  /// call. Not empty as long as the tensor is not whole; one without elements has none, and is asked for once.
  struct Room {
    MutByteSpan to;
    std::uint64_t from = 0;
    bool last = true;  ///< with these the tensor is whole
  };
  /// Whether room() does not wait for the engine.
  bool fits(std::uint32_t tensor) const { return outgoing_.fits(tensor); }
  Result<Room> room(std::uint32_t tensor, const CallContext& until);
  /// All of a tensor in the host's memory. invalid_argument if it has other bytes.
  Status put(std::uint32_t tensor, ByteSpan bytes, const CallContext& until);
  /// Returns when the engine has verified everything. coverage names what was not sent.
  Status finish(const CallContext& until);
  /// Gives the version up; the engine gets to know why.
  void abort(const Error& why) noexcept;

 private:
  Sender(LayoutPtr layout, SenderOptions options, Share share, std::unique_ptr<BucketMemory> memory,
         std::vector<std::byte> hello);
  Status connect(const CallContext& until);
  Status connect_if_closed(const CallContext& until);
  Status connect_once(const CallContext& until);
  Status issue(const CallContext& until);
  Status await(std::uint64_t request, const CallContext& until);
  /// The channel is closed; returns the error.
  Error failed(Error why);
  Status check_begun() const;

  const LayoutPtr layout_;
  const SenderOptions options_;
  const std::unique_ptr<BucketMemory> memory_;
  const std::vector<std::byte> hello_;
  const ForkGuard fork_guard_;
  Outgoing outgoing_;
  net::MessageSocket socket_;
  std::uint64_t request_ = 0;
  std::uint64_t unanswered_ = 0;  ///< the chunk before; 0: none
  bool begun_ = false;
};

}  // namespace deltasync::bucket
