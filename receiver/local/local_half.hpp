// Full updates out of the memory of an agent on this host: whether it is tried, and the half of a plan as it is mapped
// for one. Nothing crosses a socket but questions and a descriptor. The lease is the plan's, and what is copied counts
// by the digests fixed at the seal, as over a connection; the half's state word says besides whether a writer has it by
// then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/bytes.hpp"
#include "base/call_context.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/wire_local.hpp"
#include "receiver/peer.hpp"

namespace deltasync::shm {
class SegmentView;
}

namespace deltasync::receiver {

class Control;

/// Mapped only while this lives: a receiver that kept a mapping would keep the memory of a segment that the agent has
/// given up.
class LocalHalf {
 public:
  /// Asks for the segment's descriptor at the agent's Unix socket, and maps it. connection, timed_out, cancelled;
  /// permission: another user's agent, or file; peer_died: another agent's socket; layout_mismatch, corrupt: it is not
  /// what the agent said.
  static Result<std::unique_ptr<LocalHalf>> map(const wire::Local& at, std::uint64_t instance, const Layout& layout,
                                                const CallContext& until);
  ~LocalHalf();
  LocalHalf(const LocalHalf&) = delete;
  LocalHalf& operator=(const LocalHalf&) = delete;

  /// A whole version's, until the half is given back to the writers.
  ByteSpan bytes() const noexcept { return bytes_; }
  /// What was read before this was asked is the version's. Any thread.
  bool still_there() const noexcept;

 private:
  LocalHalf(std::unique_ptr<const shm::SegmentView> segment, const wire::Local& at);
  const std::unique_ptr<const shm::SegmentView> segment_;
  const unsigned half_;
  const std::uint64_t sequence_;
  const ByteSpan bytes_;
};

/// ReceiverOptions::local of one receiver.
class LocalPulls {
 public:
  LocalPulls(const Peer& peer, std::optional<bool> wanted) : peer_(peer), wanted_(wanted) {}

  /// They are tried where the agent can.
  bool is_wanted(const Control& control) const;
  /// Whether to ask this agent where its bytes lie. unsupported if they have to come from there and cannot.
  Result<bool> tries(const Control& control);
  /// They cannot be had: by the connection then, which is said once for each reason; or unsupported, if they have to.
  Status give_up(const Error& why);

 private:
  const Peer& peer_;
  const std::optional<bool> wanted_;
  std::string said_;  ///< the reason that the log has
};

}  // namespace deltasync::receiver
