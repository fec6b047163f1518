// An agent in the test's own process that speaks the wire honestly until it is told not to: it drops connections,
// flips bits, lies about lengths, stalls, revokes leases and comes back as another process. Versions are published
// by the test; deltas are the real encoder's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "format/tile_set.hpp"
#include "net/blocking.hpp"

namespace deltasync::test {

enum class Fault : std::uint8_t {
  none,
  drop,              ///< close the connection instead of an answer
  drop_midway,       ///< close it in the middle of the first payload, or of the handshake
  flip_in_transit,   ///< one bit of the payload changes on its way (hashes do not fit)
  flip_at_source,    ///< one bit of a tile's bytes is wrong, hashes fit it
  lie_long,          ///< an extent header claims more bytes than were asked for
  lie_many,          ///< a header with a good hash announces the largest frame there may be, and nothing follows
  lie_huge,          ///< a header with a good hash claims 2^60 bytes
  bad_header,        ///< the header's hash is wrong
  garbage,           ///< random bytes instead of a message
  stall,             ///< no answer, connection open
  unasked_planes,    ///< valid packed tiles where raw ones were asked for
  exponent_classes,  ///< valid frames in a codec that nobody asked for
  wrong_tiles,       ///< frames of tiles that were not asked for
  refuse,            ///< an error message
  chatter,           ///< says without end that an answer comes yet
};

/// A request on any connection, as the fault hook sees it.
struct Request {
  wire::Type type = wire::Type::hello;
  std::uint64_t ordinal = 0;  ///< how many of this type came before
  wire::TileRange tiles;      ///< get_extent and get_raw_tiles: from the first to the last
};

class FakeAgent {
 public:
  static constexpr std::uint64_t kClockNs = 12'345;  ///< what it says of its clock, which is nobody's here

  struct Setup {
    std::uint16_t port = 0;   ///< 0: any
    std::uint64_t epoch = 0;  ///< 0: any
    std::uint64_t instance = 1;
    std::string token;
    bool proves_token = true;
    std::size_t ring_deltas = 64;
    bool large_deltas = false;   ///< offered even where a full update is smaller
    bool compact = false;        ///< plans that ask for it get exponent classes
    bool hides_changes = false;  ///< steps say that they change one element
    wire::Protocols protocols;
    std::uint32_t pack_threads = 0;
    bool arriving = false;                         ///< what full plans are of, for who takes that
    double bytes_per_s = 0;                        ///< of all connections together; 0: as fast as it goes
    std::uint64_t slow_bytes = ~std::uint64_t{0};  ///< after which bytes_per_s ends
    bool same_host = false;                        ///< its clock is ours
  };

  explicit FakeAgent(LayoutPtr layout, Setup setup);
  explicit FakeAgent(LayoutPtr layout) : FakeAgent(std::move(layout), Setup{}) {}
  ~FakeAgent();

  std::string endpoint() const;

  /// The next version of the current epoch.
  VersionId publish(std::vector<std::byte> half, const std::string& label = {});
  std::vector<std::byte> newest() const;
  Version newest_version() const;
  /// The bytes of a published version; empty if there was none.
  std::vector<std::byte> half_of(const VersionId& id) const;
  /// Ends every connection and forgets all plans; the same versions are served by "another process", without a ring.
  void restart();
  /// The trainer begins again: what is published from now on has another epoch and numbers from 1.
  void new_trainer();
  /// From now on another layout is announced.
  void change_layout(LayoutPtr layout);
  /// From now on other side files are announced; deltas from before are gone.
  void change_sidecar(Sidecar sidecar);

  /// Decides about each request; called on the connection's thread, one call at a time.
  void on_request(std::function<Fault(const Request&)> hook);
  /// A plan's lease ends after so many extent bytes (0 = never): `hook` runs (publishes, say), the rest of the extent
  /// is sent from the then newest version, as if the writer had overwritten the half, and then the error comes.
  void revoke_after(std::uint64_t bytes, std::function<void()> hook);

  std::uint64_t extent_bytes() const { return extent_bytes_; }
  std::uint64_t requests(wire::Type type) const;
  std::uint64_t connections() const { return connections_; }
  /// That peers have chosen in their handshakes.
  std::set<std::uint16_t> protocols_spoken() const;
  /// Requests (no handshakes) whose answers have been handed to the kernel whole.
  std::uint64_t answers() const { return answers_; }
  /// Connections closed midway whose peer has closed its end by now, too.
  std::uint64_t hangups_seen() const { return hangups_seen_; }
  std::uint64_t live_plans() const;
  /// Of get_extent, in the order of the requests.
  std::vector<wire::TileRange> extents_asked() const;
  /// Plans seen, in order.
  std::vector<wire::PlanRequest> plans() const;

 private:
  struct State {
    Version version;
    std::chrono::steady_clock::time_point published_at = std::chrono::steady_clock::now();
    std::shared_ptr<const std::vector<std::byte>> half;
    std::shared_ptr<const std::vector<std::uint64_t>> digests;
    Digest128 root;
  };
  struct LivePlan {
    State target;
    TileSet tiles;
    std::vector<delta::DeltaPtr> steps;
    std::uint64_t sent = 0;
    bool revoked = false;
    bool revoking = false;    ///< the hook of its revocation has begun
    std::uint64_t owner = 0;  // connection
  };
  struct Peer {
    net::MessageSocket socket;
    std::uint64_t id = 0;
    wire::Role role = wire::Role::control;
    std::optional<TileSet> subscription;
    std::chrono::milliseconds alive_every{0};  ///< 0: it did not ask for it
  };

  /// A receiver's reports, and its goodbye.
  static bool has_no_answer(wire::Type type) {
    return type == wire::Type::report || type == wire::Type::end || type == wire::Type::keep_alive;
  }
  /// Ends each wait for a peer.
  static Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

  // Connections (fake_agent.cpp).
  void accept_loop();
  void serve(UniqueFd fd, std::uint64_t id);
  Status handshake(Peer& peer);
  Status send_error(Peer& peer, std::uint64_t request, Errc code, const std::string& text);
  Status send_bytes(Peer& peer, ByteSpan bytes);
  /// Returns when a link of Setup::bytes_per_s would have taken so many more bytes.
  void throttle(std::size_t bytes);
  /// Ends the connection after all that was sent has been read.
  Status hang_up(Peer& peer);
  Fault ask_hook(const Request& request);

  // Requests (fake_agent_answers.cpp).
  Status answer(Peer& peer, const net::Message& message);
  Status answer_subscribe(Peer& peer, const net::Message& message);
  Status answer_plan(Peer& peer, const net::Message& message);
  Status answer_extent(Peer& peer, const net::Message& message, Fault fault);
  Status answer_frames(Peer& peer, const net::Message& message, Fault fault);
  Status answer_raw(Peer& peer, const net::Message& message, Fault fault);
  Status send_frame(Peer& peer, std::uint64_t request, std::vector<std::byte> bytes, Fault fault);
  std::shared_ptr<LivePlan> find_plan(std::uint64_t id);
  /// Other streams of the plan stand still until the hook has published what takes its half away.
  void wait_while_revoking(const LivePlan& plan);
  std::vector<delta::DeltaPtr> chain(const TileSet& tiles, const VersionId& from, const Digest128& root,
                                     const VersionId& to) const;
  const State* state_of(const VersionId& id) const;
  wire::DeltaStep describe(const TileSet& tiles, const delta::Delta& d) const;
  delta::DeltaPtr compacted(const delta::Delta& d) const;

  LayoutPtr layout_;
  std::optional<Sidecar> sidecar_;  ///< unset: made for the layout
  const Setup setup_;
  std::mutex throttle_;
  std::chrono::steady_clock::time_point link_free_at_;  // protected by throttle_, as the next one
  std::uint64_t throttled_bytes_ = 0;
  ThreadPool pool_{1, "fake-encode"};
  UniqueFd listener_;
  std::uint16_t port_ = 0;
  std::atomic<std::uint64_t> extent_bytes_{0};
  std::atomic<std::uint64_t> connections_{0};
  std::atomic<std::uint64_t> answers_{0};
  std::atomic<std::uint64_t> hangups_seen_{0};
  std::atomic<bool> stop_{false};

  mutable std::mutex mutex_;  // protects all below
  std::uint64_t instance_ = setup_.instance;
  std::uint64_t epoch_ = 0;
  std::vector<State> versions_;
  bool new_generation_ = false;  ///< no delta leads to the next version
  std::deque<delta::DeltaPtr> ring_;
  std::map<std::uint64_t, std::shared_ptr<LivePlan>> plans_;
  std::map<std::uint64_t, int> open_fds_;
  std::map<std::uint16_t, std::uint64_t> requests_;
  std::vector<wire::PlanRequest> plans_seen_;
  std::vector<wire::TileRange> extents_asked_;
  std::function<Fault(const Request&)> hook_;
  std::uint64_t revoke_after_ = 0;
  std::function<void()> on_revoke_;
  std::set<std::uint16_t> protocols_spoken_;
  std::list<std::thread> threads_;
  std::mutex hook_mutex_;
  std::thread acceptor_;  // last: it uses all of the above
};

}  // namespace deltasync::test
