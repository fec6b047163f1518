// One connection of a receiver: handshake, then requests and replies one after the other (wire_protocol.md).
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "agent/core.hpp"
#include "agent/serve/children.hpp"
#include "agent/serve/pack_pool.hpp"
#include "agent/serve/pull_server.hpp"
#include "agent/serve/raw_tiles.hpp"
#include "agent/serve/receiver_table.hpp"
#include "base/log_limit.hpp"
#include "base/trace.hpp"
#include "net/message_stream.hpp"
#include "net/work_thread.hpp"

namespace deltasync::agent {

/// What all conversations of a server share. Outlives them.
struct PullContext {
  AgentCore& core;
  const PullServerOptions options;
  std::atomic<bool> stopping{false};
  /// Changes the connection's line of the status page.
  std::function<void(std::uint64_t connection, const std::function<void(PeerStatus&)>&)> note;
  /// A peer has authenticated. Nothing if it may stay, else the reason that the peer is told.
  std::function<Status(std::uint64_t connection, wire::Role role)> settle;
  // Lines about peers that have not authenticated, about those that were turned away, and about all others.
  log::LineLimit stranger_lines{};
  log::LineLimit refusal_lines{};
  log::LineLimit peer_lines{20};
  static constexpr std::uint64_t kUcxBytes = 5u << 20;  ///< that a connection over UCX takes, as measured
  const Room ucx_room{options.limits.ucx_connections_max * kUcxBytes};
  std::unique_ptr<net::WorkThread> ucx_setup{};  ///< makes UCX's ends of channels, which takes a while; null: no UCX
  ReceiverTable receivers{options.limits.remember};
  Children children{options.limits.admission.children_max, options.limits.child_silence};
};

/// What the tiles of a plan are compared with.
Damage::Target target_of(const OpenPlan& plan);

/// Everything runs on the stream's strand.
class PullConversation {
 public:
  PullConversation(PullContext& context, net::MessageStream stream, std::uint64_t connection);

  /// Until the peer leaves, a limit is passed, or the server stops. Ends the connection's plans.
  boost::asio::awaitable<void> run();

 private:
  using Request = net::Message;
  template <class T>
  using awaitable = boost::asio::awaitable<T>;

  // A failed Status ends the connection; refusals of single requests are answered and are no failure.
  awaitable<Status> converse();
  awaitable<Status> handshake();
  awaitable<Status> serve_requests();
  awaitable<Status> serve_watch();
  awaitable<Status> dispatch(Request& request);
  awaitable<Status> answer(Request& request);
  std::uint64_t request_bytes_max(wire::Type type) const;
  Error no_memory() const;
  // Memory for what this peer makes the agent hold. Waits for it a while, then timed_out: the agent is busy. Counts at
  // most what may be waited for, however large the message is.
  /// For a request; the conversation has no other share.
  awaitable<Result<Room::Share>> hold_request(std::uint64_t bytes);
  /// For a part of its answer; the conversation has no share of another part. `permit` (null: none) as in
  /// MessageStream.
  awaitable<Result<Room::Share>> hold(std::uint64_t bytes, const net::MessageStream::MaySend* permit = nullptr);
  using Take = std::optional<Room::Share> (Room::*)(std::uint64_t bytes) const;
  awaitable<Result<Room::Share>> wait_for_room(Take take, std::uint64_t bytes,
                                               const net::MessageStream::MaySend* permit);
  /// Frees the request's payload first: the answer may wait for the peer.
  awaitable<Status> refuse(Request& request, Error error);
  /// The plan that a request names: a sign of life of the child that has it.
  Result<OpenPlanPtr> find_plan(std::uint64_t id);
  /// Likewise, of a request with ranges; an error if its layout cannot have so many.
  Result<OpenPlanPtr> find_plan(const wire::RangesHead& head);
  /// The end of an answer, or why it ends early.
  awaitable<Status> conclude(Request& request, const Status& sent);
  awaitable<Status> send_end(const Request& request);

  awaitable<Status> on_get_layout(Request& request);
  Status on_report(const Request& request);
  /// Ends the conversation: what else holds the socket, such as a forked child of the receiver's, has no use for it.
  Status on_goodbye(const Request& request);
  awaitable<Status> on_get_lag(Request& request);
  Status on_keep_alive(const Request& request);
  awaitable<Status> on_relay_to(Request& request);
  // pull_plan.cpp
  awaitable<Status> on_subscribe(Request& request);
  Result<SubsetPtr> make_subset(ByteSpan payload);
  awaitable<Status> on_plan(Request& request);
  awaitable<Status> send_elsewhere(Request& request, std::vector<std::string> endpoints);
  /// Why a plan that brings nothing newer, or waits for it, is refused now: nobody brings it. Said now and then; for
  /// the rest of the time the plan is answered as any other.
  std::optional<Error> cut_off(const wire::PlanRequest& plan);
  awaitable<Status> on_release(Request& request);
  awaitable<Status> on_check_tiles(Request& request);
  awaitable<Status> on_get_local(Request& request);
  // pull_data.cpp
  awaitable<Status> on_get_digests(Request& request);
  awaitable<Status> on_get_extent(Request& request);
  awaitable<Status> on_get_frames(Request& request);
  awaitable<Status> on_get_raw_tiles(Request& request);
  // pull_ucx.cpp
  awaitable<Status> on_open_ucx(Request& request);
  // These send an answer, without its last message. While they run they are Readers of the plan and hold what it holds;
  // not longer, so that a peer cannot keep it by not reading the last message.
  awaitable<Status> send_extents(std::uint64_t request, OpenPlanPtr plan, wire::TileRange tiles);
  awaitable<Status> send_extent(std::uint64_t request, const OpenPlan& plan, std::uint64_t at, std::uint64_t bytes,
                                const LeaseTable::Reader& reader);
  awaitable<Status> send_extent_copy(std::uint64_t request, const OpenPlan& plan, std::uint64_t at, std::uint64_t bytes,
                                     const net::MessageStream::MaySend& permit);
  awaitable<Status> send_frames(std::uint64_t request, OpenPlanPtr plan, wire::GetFrames wanted);
  awaitable<Status> send_raw_tiles(std::uint64_t request, OpenPlanPtr plan, wire::GetRawTiles wanted);
  awaitable<Status> send_packed(std::uint64_t request, OpenPlanPtr plan, RawTileRuns& runs,
                                const net::MessageStream::MaySend& permit);
  awaitable<Status> send_tiles(std::uint64_t request, const PackedFrame& made,
                               const net::MessageStream::MaySend& permit);
  awaitable<Result<PackedFramePtr>> next_packed(PackAhead& ahead, const OpenPlan& plan,
                                                const net::MessageStream::MaySend& permit);
  Result<PackedFramePtr> make_raw(const OpenPlan& plan, std::span<const std::uint64_t> tiles);
  // pull_arrival.cpp
  /// Of a version that arrives: until the first of `tiles` are in place. Returns where those end; in whole bands.
  awaitable<Result<std::uint64_t>> wait_for_tiles(const OpenPlan& plan, wire::TileRange tiles,
                                                  const net::MessageStream::MaySend& permit);
  /// Until all of these are.
  awaitable<Status> wait_for_tiles(const OpenPlan& plan, std::span<const std::uint64_t> tiles,
                                   const net::MessageStream::MaySend& permit);
  awaitable<Status> wait_for_more(const OpenPlan& plan, std::chrono::milliseconds& look,
                                  const net::MessageStream::MaySend& permit);
  /// A delta that arrives: its frames as they come.
  awaitable<Status> send_arriving_frames(std::uint64_t request, const OpenPlan& plan, const RingEntry& entry,
                                         const std::vector<wire::TileRange>& ranges,
                                         const net::MessageStream::MaySend& permit);
  /// Whole messages; lease_revoked, with nothing out, if they may not even begin. When it fails otherwise, nothing more
  /// can be said on this connection.
  awaitable<Status> send(std::span<const ByteSpan> pieces, const net::MessageStream::MaySend& permit);

  /// These, or publications, wake wait_for_version while the listener lives.
  Changes::Listener hear(Changes& changes);
  Changes::Listener hear_versions() { return hear(core_.versions().changes()); }
  /// Until a version is published, a short while has passed, or the deadline. Says `alive` when that is due: between
  /// two messages.
  awaitable<Status> wait_for_version(Deadline deadline);
  /// What is served; nothing if it is what `told` names. Updates `told`.
  std::optional<wire::VersionReady> news(HalfKey& told) const;
  void log_end(const Status& status) const;

  PullContext& context_;
  AgentCore& core_;
  const PullLimits& limits_;
  const std::uint64_t connection_;
  net::MessageStream stream_;
  boost::asio::steady_timer version_timer_;                                       ///< cancelled by a publication
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);  ///< for posts that outlive us
  std::string address_;
  std::string name_;
  std::uint32_t track_ = 0;  ///< of the timeline
  VersionId asked_;          ///< what the request at hand is about
  wire::Role role_ = wire::Role::control;
  std::uint16_t protocol_ = wire::kProtocolOldest;  ///< the peer's
  std::optional<std::uint64_t> reporter_;           ///< the receiver that reports over this connection
  std::chrono::milliseconds alive_every_{0};        ///< how often the peer wants to hear that we are there; 0: never
  std::chrono::steady_clock::time_point alive_at_;  ///< when it is due
  std::uint64_t answering_ = 0;                     ///< the request at hand
  std::chrono::steady_clock::time_point cut_off_said_at_;  ///< to this peer
  SubsetPtr subset_;                                       ///< null until the peer subscribes
  bool over_ucx_ = false;
  Room::Share ucx_held_;
  bool authenticated_ = false;
  bool turned_away_ = false;  ///< it authenticated, and there is no place for it
  bool mid_message_ = false;  ///< part of a message is out: nothing else can be said on this connection
};

}  // namespace deltasync::agent
