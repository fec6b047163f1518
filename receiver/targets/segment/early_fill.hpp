// A version that is written into the segment while it comes, where that has none yet: the agent hands its tiles on to
// those who wait for the first version (shm_protocol.md "Versions that arrive").
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "deltasync/writer.hpp"
#include "format/tiling.hpp"

namespace deltasync::relay {

class EarlyFill {
 public:
  /// Both are borrowed. The writer is used by nobody else while the fill is open.
  EarlyFill(const Layout& layout, Writer& writer) : layout_(layout), writer_(writer) {}
  ~EarlyFill() { end(); }
  EarlyFill(const EarlyFill&) = delete;
  EarlyFill& operator=(const EarlyFill&) = delete;

  /// Tells the agent what comes, and begins the fill. On error none is open.
  Status begin(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
               Deadline deadline);
  bool is_open() const;
  bool is_of(const Version& version, const Digest128& root) const;
  /// Writes those of these tiles that are not written yet, as they are in `from`, a whole half, and looks at what was
  /// written. Any thread. What goes wrong ends the fill: then the version is written when it is whole.
  void write(ByteSpan from, std::span<const std::uint64_t> tiles);
  /// By tile: 1 if it is written. While no thread writes.
  std::span<const std::uint8_t> written() const { return written_; }
  /// The caller commits it, or aborts it.
  void take_over() noexcept;
  /// Aborts it.
  void end() noexcept;

 private:
  Status write_locked(ByteSpan from, std::span<const std::uint64_t> tiles);
  Status look_at(ByteSpan half, std::span<const std::uint64_t> tiles) const;
  void end_locked() noexcept;

  const Layout& layout_;
  Writer& writer_;
  mutable std::mutex mutex_;  // the writer is one thread's at a time
  bool open_ = false;         // protected by mutex_, as all below
  Version version_;
  Digest128 root_;
  std::vector<std::uint64_t> digests_;
  std::vector<std::uint8_t> written_;
};

}  // namespace deltasync::relay
