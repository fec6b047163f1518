// The agent's side of the trainer's Unix socket: who the writers are, which slot each has, whether their plans fit
// together, and when a version is served. TrainerHooks is what it needs of the agent's core. The protocol is in
// trainer_protocol.md.
#pragma once

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "base/process.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"
#include "format/wire.hpp"
#include "format/wire_report.hpp"
#include "shm/segment.hpp"

namespace deltasync::agent {

/// The generation of the segment that a writer is to map.
struct OpenSegment {
  shm::SegmentPath path;
  std::uint64_t generation = 0;
  VersionId newest;  ///< last sealed version; epoch 0 if none
  UniqueFd file{};   ///< the segment's, for the writer
  /// A new epoch has to be later than this one: that of the segment's newest version, or of what a receiver holds. 0:
  /// none.
  std::uint64_t epoch = 0;
};

/// What the server needs from the agent's core. open_segment, grant, writer_gone and arrives are called on the server's
/// own thread "trainer-setup", one at a time, and may block (reserving memory takes its time); segment_changed and
/// ready are called on the io_context and must not.
class TrainerHooks {
 public:
  virtual ~TrainerHooks() = default;

  /// The current generation if it has this layout and sidecar (an empty one fits any); else a new one.
  /// layout_mismatch if a live writer holds a slot of a generation with others, unless it is `asker`'s and in no
  /// fill; no_space. Called again for each writer of a job, so it answers alike each time. `asker`: the process that
  /// asks; all zero if it has a connection besides the one on which it asks.
  virtual Result<OpenSegment> open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                           const ProcessId& asker) = 0;
  /// Gives a slot of that generation to the process that `watch` holds. Granting a slot again to the process that has
  /// it is fine (it lost its connection, or the agent was restarted). Returns a number that no other grant of this
  /// generation has. already_exists names a live owner's pid.
  virtual Result<std::uint64_t> grant(std::uint64_t generation, std::uint32_t slot, std::uint32_t writers,
                                      ProcessWatch watch) = 0;
  /// The process that got the slot said goodbye, is proved dead, or was refused after all. May come late: does nothing
  /// if the slot was granted again since.
  virtual void writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) = 0;

  /// The file of that generation's segment, open for reading: for a receiver on this host. On the io_context: must not
  /// block.
  virtual Result<UniqueFd> segment_to_read(std::uint64_t /*generation*/) {
    return Error(Errc::unsupported, "no segment is handed out for reading");
  }
  /// A writer says that the segment has changed.
  virtual void segment_changed() = 0;
  /// A writer says how long its offload took.
  virtual void offloaded(const wire::TrainerNotify& /*durations*/) {}
  /// A writer that is a relay says where its versions come from.
  virtual void relays(std::uint64_t /*connection*/, const ProcessId& /*relay*/, wire::Parents /*said*/) {}
  /// Its connection has ended.
  virtual void relay_gone(std::uint64_t /*connection*/) {}
  /// It says what comes to it, and hands over the memory where; or that nothing does any more. On "trainer-setup".
  virtual Status arrives(std::uint64_t /*connection*/, std::uint64_t /*generation*/, wire::TrainerArrival /*said*/,
                         UniqueFd /*memory*/) {
    return Error(Errc::unsupported, "no version is taken while it arrives");
  }
  /// It says which delta comes to it, or that none does any more; and a part of that delta. On the io_context: must
  /// not block.
  virtual Status delta_arrives(std::uint64_t /*connection*/, std::uint64_t /*generation*/,
                               wire::TrainerDelta /*said*/) {
    return Error(Errc::unsupported, "no delta is taken while it arrives");
  }
  virtual Status frames_arrive(std::uint64_t /*connection*/, wire::TrainerFrames /*part*/) {
    return Error(Errc::unsupported, "no delta is taken while it arrives");
  }
  /// A writer that is none has offloaded a version.
  virtual void trains() {}
  /// The answer to a writer that waits for `version`, or a later one of its epoch, to be served. Nothing: not yet. An
  /// error: it never will be. Call TrainerServer::version_served when the answer may have changed.
  virtual Result<std::optional<wire::TrainerReady>> ready(const VersionId& version) = 0;
};

struct TrainerServerOptions {
  std::string socket_path;                           ///< ≤ 107 bytes; mode 0600
  std::chrono::milliseconds hello_limit{5'000};      ///< connect → first byte of trainer_hello
  std::chrono::milliseconds message_limit{30'000};   ///< first byte of a message → its last; a reply's sending
  std::chrono::milliseconds wait_limit{3'600'000};   ///< the longest deadline that a request may name
  std::chrono::milliseconds idle_limit{86'400'000};  ///< between two messages; the slot outlives the connection
  std::size_t connections_max = 256;
  std::uint64_t instance = 0;          ///< as PullServerOptions::instance
  std::function<void()> before_check;  ///< for tests: called before each check of plans, on the thread that makes it
  std::function<void()>
      before_trial;  ///< for tests: the same on the strand; what it throws is as a lack of memory there
};

/// A writer as the status page shows it.
struct TrainerStatus {
  std::uint32_t slot = 0;
  std::uint32_t writers = 0;
  std::uint64_t generation = 0;
  std::int32_t pid = 0;
  std::string name;
  bool connected = false;  ///< false: its connection ended but its process lives, so it keeps its slot
  bool planned = false;    ///< its plan was accepted
  bool waiting = false;    ///< its plan waits for those of the other writers
};

/// Runs on `io`, on a strand of its own; `io` may be run by any number of threads.
class TrainerServer {
 public:
  /// Listens. A socket file that nobody answers on is removed; already_exists if somebody does. `io` and `hooks`
  /// must outlive the server.
  static Result<std::unique_ptr<TrainerServer>> listen(boost::asio::io_context& io, TrainerHooks& hooks,
                                                       TrainerServerOptions options);
  /// Call stop() first and let `io` run until it did its work, or destroy the server after `io` has stopped.
  ~TrainerServer();
  TrainerServer(const TrainerServer&) = delete;
  TrainerServer& operator=(const TrainerServer&) = delete;

  /// Any thread: a version became served, or ready() would fail now.
  void version_served();
  /// Any thread: closes the socket and all conversations, and removes the socket file. Slots stay as they are: the
  /// segment outlives the agent.
  void stop();
  /// Any thread.
  std::vector<TrainerStatus> status() const;
  const std::string& socket_path() const noexcept;

 private:
  struct Impl;
  explicit TrainerServer(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltasync::agent
