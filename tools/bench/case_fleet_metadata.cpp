// bench fleet-metadata: what names and subscriptions cost where there are very many of both, apart from weights. One
// agent and real receivers are processes; most of the fleet are conversations of this one, which say what receivers
// say and keep no model.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/bytes.hpp"
#include "bench/end_to_end.hpp"
#include "bench/limits.hpp"
#include "bench/processes.hpp"
#include "delta/delta.hpp"
#include "format/tile_set.hpp"
#include "format/wire_report.hpp"
#include "net/auth.hpp"
#include "net/endpoint.hpp"
#include "receiver/connection.hpp"

namespace deltasync::bench {
namespace {

constexpr unsigned kRanks = 8;            ///< that attention is cut for
constexpr unsigned kLayerTensors = 4000;  ///< of which the first few are of attention, the others of experts
constexpr unsigned kAttention = 4;
constexpr std::uint64_t kElements = 512;  ///< of a tensor

/// Layers of a mixture of very many small experts.
Result<LayoutPtr> layout_of(unsigned tensors) {
  constexpr const char* kAttentionNames[kAttention] = {"q_proj", "k_proj", "v_proj", "o_proj"};
  constexpr const char* kExpertNames[] = {"gate_proj", "up_proj", "down_proj"};
  std::vector<TensorSpec> specs;
  specs.reserve(tensors);
  for (unsigned i = 0; i < tensors; ++i) {
    const unsigned at = i % kLayerTensors;
    const std::string layer = "model.layers." + std::to_string(i / kLayerTensors);
    if (at < kAttention) {
      specs.push_back(
          {layer + ".self_attn." + kAttentionNames[at] + ".weight", Dtype::bf16, {kRanks, kElements / kRanks}});
      for (unsigned cut = 1; cut < kRanks; ++cut) specs.back().row_cuts.push_back(cut);
    } else {
      const unsigned expert = at - kAttention;
      specs.push_back(
          {layer + ".mlp.experts." + std::to_string(expert / 3) + "." + kExpertNames[expert % 3] + ".weight",
           Dtype::bf16,
           {16, kElements / 16}});
    }
  }
  return Layout::build(std::move(specs));
}

/// What number `index` of `count` engine ranks wants: of each layer a row of each tensor of attention, and a run of
/// experts. No two want the same, as long as there are as many experts as groups.
Result<TileSet> subscription_of(const Layout& layout, unsigned index, unsigned count) {
  const auto tensors = static_cast<unsigned>(layout.tensors().size());
  const unsigned groups = (count + kRanks - 1) / kRanks;
  const unsigned group = index / kRanks;
  std::vector<wire::TileRange> ranges;
  for (unsigned layer = 0; layer < tensors; layer += kLayerTensors) {
    const unsigned end = std::min(layer + kLayerTensors, tensors);
    for (unsigned t = layer; t < std::min(layer + kAttention, end); ++t) {
      const std::uint64_t tile = layout.tensors()[t].first_tile + index % kRanks;
      ranges.push_back({tile, tile + 1});
    }
    if (end <= layer + kAttention) continue;
    const std::uint64_t experts = end - layer - kAttention;
    const std::uint64_t first = layout.tensors()[layer + kAttention].first_tile;
    const wire::TileRange run{first + experts * group / groups, first + experts * (group + 1) / groups};
    if (run.first != run.end) ranges.push_back(run);
  }
  return TileSet::make(layout, ranges);
}

/// A receiver's conversations with the agent, without a model. It says what one says that keeps up.
class Conversation {
 public:
  Conversation(const receiver::Peer& peer, std::shared_ptr<const TileSet> tiles)
      : peer_(&peer), tiles_(std::move(tiles)) {
    standing_.receiver = net::make_random_id();
  }

  /// To the end of the subscription, and the one for data.
  Status connect() {
    DS_ASSIGN(control_, open(wire::Role::control));
    DS_TRY(send(control_, standing_));
    DS_TRY(send(control_, wire::Subscribe{tiles_->layout(), tiles_->ranges()}));
    DS_TRY(receive<wire::Empty>(control_));
    return dial();
  }
  /// What it holds from now on, whose root the agent must know.
  Status hold(const Version& version, const Digest128& root) {
    standing_.committed = version;
    root_ = root;
    return send(control_, standing_);
  }
  /// Asks for the version after that one; the agent answers when it has it.
  Status ask() {
    wire::PlanRequest plan;
    plan.layout = tiles_->layout();
    plan.base = standing_.committed.id;
    plan.base_root = root_;
    plan.want = wire::WantKind::newer;
    plan.wait_ms = std::chrono::milliseconds(kCaseLimit).count();
    plan.subscription = tiles_->digest();
    return send(control_, plan);
  }
  Result<wire::PlanReply> answer() {
    DS_ASSIGN(wire::PlanReply reply, receive<wire::PlanReply>(control_));
    if (reply.mode != wire::PlanMode::delta) return Error(Errc::internal, "a receiver that keeps up gets no delta");
    return reply;
  }
  /// All frames of a plan, then the end of the plan. Bytes of the frames.
  Result<std::uint64_t> fetch(const wire::PlanReply& plan) {
    if (data_.stale()) DS_TRY(dial());  // the agent closes what is idle
    std::uint64_t bytes = 0;
    for (std::uint32_t step = 0; step < plan.steps.size(); ++step) {
      if (plan.steps[step].frames == 0) continue;
      DS_TRY(send(data_, wire::GetFrames{plan.plan, step, tiles_->windows(tiles_->ranges())}));
      for (;;) {
        DS_ASSIGN(const wire::Header header, data_.recv_header(limit()));
        DS_ASSIGN(const auto payload, data_.recv_payload(header, limit()));
        if (header.type == static_cast<std::uint16_t>(wire::Type::error)) return receiver::agent_error(payload);
        if (header.type == static_cast<std::uint16_t>(wire::Type::end)) break;
        if (header.type != static_cast<std::uint16_t>(wire::Type::frame)) return receiver::unexpected(header, 0);
        bytes += payload.size();
      }
    }
    DS_TRY(send(control_, wire::Release{plan.plan}));
    DS_TRY(receive<wire::Empty>(control_));
    return bytes;
  }

  const TileSet& tiles() const noexcept { return *tiles_; }
  /// In both directions, on both connections, so far; but for dialling the one for data.
  std::uint64_t wire_bytes() const noexcept { return bytes_of(control_) + data_bytes_ + bytes_of(data_); }
  /// Of that, which an update costs too if there was none for longer than the agent keeps idle ones.
  std::uint64_t dial_bytes() const noexcept { return dial_bytes_; }

 private:
  static Deadline limit() { return Deadline::after(kCaseLimit); }
  static std::uint64_t bytes_of(const receiver::Connection& connection) noexcept {
    return connection.bytes_sent() + connection.bytes_received();
  }
  Result<receiver::Connection> open(wire::Role role) {
    DS_ASSIGN(auto connection, receiver::Connection::dial(*peer_, limit()));
    DS_TRY(connection.handshake(*peer_, role, limit()));
    return connection;
  }
  Status dial() {
    data_bytes_ += bytes_of(data_);
    DS_ASSIGN(data_, open(wire::Role::data));
    dial_bytes_ = bytes_of(data_);
    data_bytes_ -= dial_bytes_;
    return {};
  }
  template <class M>
  static Status send(receiver::Connection& connection, const M& message) {
    return connection.send(connection.next_request(), message, limit());
  }
  template <class M>
  static Result<M> receive(receiver::Connection& connection) {
    DS_ASSIGN(const wire::Header header, connection.recv_header(limit()));
    DS_ASSIGN(const auto payload, connection.recv_payload(header, limit()));
    if (header.type == static_cast<std::uint16_t>(wire::Type::error)) return receiver::agent_error(payload);
    if (header.type != static_cast<std::uint16_t>(M::kType)) return receiver::unexpected(header, 0);
    return M::decode(payload);
  }

  const receiver::Peer* peer_;
  std::shared_ptr<const TileSet> tiles_;
  wire::Report standing_;
  Digest128 root_;
  receiver::Connection control_;
  receiver::Connection data_;
  std::uint64_t data_bytes_ = 0;  ///< of data connections that are closed, less the dials of all; may wrap around
  std::uint64_t dial_bytes_ = 0;
};

/// The trainer, its bytes, and the version that they are.
class TinyTrainer {
 public:
  static Result<TinyTrainer> start(const Options& options, const BenchAgent& agent, const LayoutPtr& layout,
                                   ThreadPool& pool) {
    DS_ASSIGN(Buffer half, Buffer::allocate(layout->half_bytes(), pool));
    const Stopwatch watch;
    DS_ASSIGN(Trainer trainer, Trainer::attach(agent.socket(), layout, half.span(), options.threads));
    TinyTrainer made(layout, std::move(half), std::move(trainer), pool);
    made.attach_s = watch.seconds();
    return made;
  }
  /// Changes as much of each tensor as `density` says. Then `digests` has all tiles' digests.
  Status publish(double density) {
    const auto stride = static_cast<std::uint64_t>(std::clamp(1 / density, 1.0, double{kElements}));
    for (const Tensor& tensor : layout_->tensors()) {
      for (std::uint64_t e = version.id.number % stride; e < kElements; e += stride) {
        half_.span()[tensor.offset + 2 * e] ^= std::byte{1};
      }
    }
    DS_ASSIGN(const Round round, trainer_.publish());
    version = round.version;
    digests.resize(layout_->tile_count());
    delta::half_digests(*layout_, half_.span(), digests, *pool_);
    return {};
  }

  double attach_s = 0;
  Version version;
  std::vector<std::uint64_t> digests;

 private:
  TinyTrainer(LayoutPtr layout, Buffer half, Trainer trainer, ThreadPool& pool)
      : layout_(std::move(layout)), half_(std::move(half)), trainer_(std::move(trainer)), pool_(&pool) {}

  LayoutPtr layout_;
  Buffer half_;
  Trainer trainer_;
  ThreadPool* pool_;
};

/// The fleet's conversations, and what they cost.
struct Fleet {
  std::vector<Conversation> all;
  std::vector<double> connect_s;
  std::vector<double> metadata_bytes;  ///< of each update of each

  Status connect(const receiver::Peer& peer, const Layout& layout, unsigned count, const TinyTrainer& source) {
    for (unsigned i = 0; i < count; ++i) {
      DS_ASSIGN(TileSet tiles, subscription_of(layout, i, count));
      all.emplace_back(peer, std::make_shared<const TileSet>(std::move(tiles)));
      const Stopwatch watch;
      DS_TRY(all.back().connect());
      connect_s.push_back(watch.seconds());
      DS_TRY(hold(all.back(), source));
    }
    return {};
  }
  /// One version, for which all of them wait.
  Status update(TinyTrainer& source, double density) {
    std::vector<std::uint64_t> before;
    for (Conversation& one : all) {
      before.push_back(one.wire_bytes());
      DS_TRY(one.ask());
    }
    DS_TRY(source.publish(density));
    for (std::size_t i = 0; i < all.size(); ++i) {
      Conversation& one = all[i];
      DS_ASSIGN(const wire::PlanReply plan, one.answer());
      if (plan.target_root != one.tiles().root(source.digests)) {
        return Error(Errc::corrupt, "a subscription's root differs from the trainer's");
      }
      DS_ASSIGN(const std::uint64_t frame_bytes, one.fetch(plan));
      DS_TRY(hold(one, source));
      metadata_bytes.push_back(static_cast<double>(one.wire_bytes() - before[i] - frame_bytes));
    }
    return {};
  }

 private:
  static Status hold(Conversation& one, const TinyTrainer& source) {
    return one.hold(source.version, one.tiles().root(source.digests));
  }
};

double worst(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

}  // namespace

Result<Json> run_fleet_metadata(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const LayoutPtr layout, layout_of(options.tensors));
  DS_ASSIGN(const BenchAgent agent, BenchAgent::start(options));
  DS_ASSIGN(TinyTrainer source, TinyTrainer::start(options, agent, layout, pool));
  DS_TRY(source.publish(options.density));
  DS_ASSIGN(const net::Endpoint endpoint, net::parse_endpoint(agent.endpoint()));
  const receiver::Peer peer{std::make_shared<receiver::Addresses>(
                                std::vector<receiver::Address>{{agent.endpoint(), endpoint.host, endpoint.port}}),
                            "",
                            "bench",
                            {}};
  // What a version costs without the fleet.
  DS_TRY(source.publish(options.density));
  DS_ASSIGN(const double alone_from_s, process_cpu_s(agent.pid()));
  DS_TRY(source.publish(options.density));
  DS_ASSIGN(const double before_s, process_cpu_s(agent.pid()));
  const double alone_s = before_s - alone_from_s;
  const std::uint64_t before_bytes = rss_anon_bytes(agent.pid());

  Fleet fleet;
  DS_TRY(fleet.connect(peer, *layout, options.subscriptions, source));
  DS_ASSIGN(const double subscribed_s, process_cpu_s(agent.pid()));
  const std::uint64_t bytes = rss_anon_bytes(agent.pid());  // now: later the ring has more deltas
  for (unsigned i = 0; i < rounds_of(options); ++i) DS_TRY(fleet.update(source, options.density));
  DS_ASSIGN(const double updated_s, process_cpu_s(agent.pid()));

  std::vector<double> whole_connect_s;  // of processes that know nothing yet
  for (unsigned i = 0; i < rounds_of(options); ++i) {
    DS_ASSIGN(Child receiver, start_receiver(options, agent, 0, true));
    DS_ASSIGN(const Json line, next_line(receiver));
    if (line.contains("error")) return Error(Errc::internal, "a receiver failed: " + line.dump());
    whole_connect_s.push_back(line.at("connect_s").get<double>());
  }
  const auto count = static_cast<double>(options.subscriptions);
  const std::uint64_t grown = bytes - std::min(bytes, before_bytes);
  return Json{
      {"tensors", options.tensors},
      {"subscriptions", options.subscriptions},
      {"ranges_each", fleet.all.front().tiles().ranges().size()},
      {"attach_s", source.attach_s},
      {"connect_s", median(whole_connect_s)},
      {"connect_worst_s", worst(whole_connect_s)},
      {"subscribe_ms", 1e3 * median(fleet.connect_s)},
      {"subscribe_worst_ms", 1e3 * worst(fleet.connect_s)},
      {"agent_cpu_subscribe_ms", 1e3 * (subscribed_s - before_s) / count},
      {"metadata_bytes_per_update", static_cast<std::uint64_t>(median(fleet.metadata_bytes))},
      {"metadata_bytes_worst", static_cast<std::uint64_t>(worst(fleet.metadata_bytes))},
      {"dial_bytes", fleet.all.front().dial_bytes()},
      {"agent_cpu_update_ms", 1e3 * std::max(0.0, (updated_s - subscribed_s) / rounds_of(options) - alone_s) / count},
      {"agent_bytes_per_subscription", grown / options.subscriptions},
      {"agent_rss_bytes", bytes}};
}

}  // namespace deltasync::bench
