// A target that hands versions on: it writes them into the segment of another agent, which serves them to the receivers
// of its node.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/target.hpp"

namespace deltasync {

struct RelayTargetOptions {
  std::string agent_socket;    ///< the Unix socket of the agent that is to serve the versions
  unsigned threads = 0;        ///< that copy into the segment, as WriterOptions::threads
  std::string name = "relay";  ///< for that agent's log and status
  /// The agent process that is pulled from (receiver::agent_instance_of), which must be another one; 0: not known.
  std::uint64_t pulled_from = 0;
  /// Where others may pull from that agent, HOST:PORT: the agent that is pulled from sends receivers there for which it
  /// has no place (--children-max). Empty: nobody is sent there.
  std::string advertise = {};
  /// How long a commit waits for the half that the version goes into: until the agent has diffed the version before and
  /// the last receiver has left the one before that. Then it fails, and names what holds the half.
  std::chrono::nanoseconds guard_limit = std::chrono::minutes(1);
};

/// Keeps whole models in the segment of the agent at `agent_socket`, whose only writer it is: what trains writes to
/// another agent, from which a receiver pulls, for which the target is made: with its layout and its sidecar. Versions
/// keep epoch, number, label and digests, so that a receiver may go from one of the two agents to the other and still
/// gets deltas.
///
///   - A commit fills the half that is free. That has the version before the last, to which the changes since are
///     applied; the whole of it is compared with the digests that came with the version once that is served (the
///     second receiver::wait_served() and later ones): what differs is Errc::corrupt, and the next version comes whole.
///     Where the half is unknown all of it is written, and compared before it is sealed.
///   - A delta is handed on as it came, so that the agent need not compare halves. What it is made of stays in memory
///     until the next one: its frames, and its changes decoded.
///   - A commit is final: rollback() of a committed update is unsupported, since receivers may have it by then
///     (Receiver::supports_rollback). So a receiver with this target takes no part in a commit over ranks.
///   - A full update waits in host memory, as large as the model, for its commit. While the agent serves nothing, it
///     hands the tiles on to receivers as they come. FullUpdatePolicy::in_place is like stage.
///   - Bound again over a segment that holds a version (a restart), it goes on from that one: a delta, not the model.
///   - Once the segment is gone (its agent was restarted without it, or took another layout meanwhile), the commit or
///     receiver::wait_served() that finds out fails with `aborted`, nothing is committed, and the next pull is a full
///     one.
///
/// Errors: those of Writer::attach(); already_exists while another process relays to that agent or trains with it;
/// invalid_argument if it is the very agent that is pulled from.
Result<std::unique_ptr<Target>> make_relay_target(LayoutPtr layout, const Sidecar& sidecar,
                                                  const RelayTargetOptions& options, const CallOptions& call);

}  // namespace deltasync
