// A segment as a receiver on the agent's host sees it: mapped for reading only, from a descriptor that the agent handed
// over. It cannot write, and holds nobody up: it reads without holding, and looks afterwards (shm_protocol.md).
//
// A file that is made shorter while it is mapped kills who reads beyond its end. Nothing of this project does that, and
// only processes of the same user can, which could end this one as well; so its size is checked when it is mapped, and
// no signal is handled. (It could not be sealed against that: the agent gives it a name for the next one to adopt.)
#pragma once

#include <cstdint>
#include <memory>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "base/fork_guard.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

class SegmentView {
 public:
  /// Validates the control block against the file's size, as Segment::attach() does. corrupt names the field;
  /// unsupported (format version), permission (not this user's, or not mode 0600).
  static Result<std::unique_ptr<SegmentView>> map(const UniqueFd& file);
  /// Does nothing in a forked child, which does not inherit the mapping.
  ~SegmentView();
  SegmentView(const SegmentView&) = delete;
  SegmentView& operator=(const SegmentView&) = delete;

  std::uint64_t generation() const noexcept { return header_.generation; }
  Digest128 layout_digest() const noexcept;
  /// A whole version's bytes, which writers may change as soon as the half is theirs again.
  ByteSpan half(unsigned index) const noexcept;
  /// As shm::still_holds(). Any thread.
  bool still_holds(unsigned half, std::uint64_t sequence) const noexcept;

 private:
  SegmentView(const std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes), header_(control().header) {}
  const ControlBlock& control() const noexcept { return *reinterpret_cast<const ControlBlock*>(base_); }

  const ForkGuard fork_guard_;
  const std::byte* const base_;
  const std::size_t bytes_;
  const SegmentHeader header_;  ///< as it was validated, whatever becomes of the one that is mapped
};

}  // namespace deltasync::shm
