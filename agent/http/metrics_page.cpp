// GET /metrics: what was counted, and what there is now.
#include "agent/http/metrics_page.hpp"

#include <algorithm>
#include <utility>

#include "base/metrics.hpp"
#include "net/tls.hpp"

namespace deltasync::agent {
namespace {

/// Lines for each receiver are as many series in a database that keeps them for weeks.
constexpr std::size_t kReceiversShownMax = 100;

/// Those that are furthest behind come first.
void add_receivers(metrics::Gauges& out, std::vector<ReceiverStatus> all) {
  std::stable_sort(all.begin(), all.end(), [](const ReceiverStatus& a, const ReceiverStatus& b) {
    const auto rank = [](const ReceiverStatus& r) { return std::pair(r.row.connection == 0, -r.behind_s()); };
    return rank(a) < rank(b);
  });
  double connected = 0, lost = 0, failing = 0, versions_max = 0, seconds_max = 0;
  for (const ReceiverStatus& receiver : all) {
    if (receiver.row.connection == 0) {
      lost += receiver.row.lost ? 1 : 0;
      continue;
    }
    ++connected;
    failing += receiver.row.error.empty() ? 0 : 1;
    versions_max = std::max(versions_max, static_cast<double>(receiver.behind.versions));
    seconds_max = std::max(seconds_max, receiver.behind_s());
  }
  out.family("receivers",
             "Receivers that are connected, that have left, and that were lost: without a goodbye. Both are forgotten "
             "after a while.");
  out.sample(connected, {{"state", "connected"}});
  out.sample(static_cast<double>(all.size()) - connected - lost, {{"state", "left"}});
  out.sample(lost, {{"state", "lost"}});
  out.add("receivers_failing", "Connected receivers whose last pull or commit failed.", failing);
  out.add("receivers_versions_behind_max", "The most versions that a connected receiver is behind.", versions_max);
  out.add("receivers_seconds_behind_max", "The longest time that a connected receiver has been behind.", seconds_max);
  const std::size_t shown = std::min(all.size(), kReceiversShownMax);
  out.add("receivers_left_out", "Receivers that have no lines of their own below: the least behind of too many.",
          static_cast<double>(all.size() - shown));
  const auto each = [&](const char* name, const char* help, auto value) {
    out.family(name, help);
    for (std::size_t i = 0; i < shown; ++i) {
      const ReceiverRow& row = all[i].row;
      out.sample(value(all[i]), {{"receiver", row.name}, {"host", row.host}, {"n", std::to_string(row.ordinal)}});
    }
  };
  each("receiver_connected", "1 while the receiver is connected.",
       [](const ReceiverStatus& r) { return r.row.connection != 0 ? 1.0 : 0.0; });
  each("receiver_failing", "1 if the receiver's last pull or commit failed.",
       [](const ReceiverStatus& r) { return r.row.error.empty() ? 0.0 : 1.0; });
  each("receiver_versions_behind", "Versions published after the one that the receiver has committed.",
       [](const ReceiverStatus& r) { return static_cast<double>(r.behind.versions); });
  each("receiver_seconds_behind", "Time since the first of these was published; 0 if there is none.",
       [](const ReceiverStatus& r) { return r.behind_s(); });
}

void add_served(metrics::Gauges& out, const Snapshot& now) {
  const ServedVersion none{};
  const ServedVersion& served = now.served ? *now.served : none;
  const std::uint64_t elements = served.generation ? served.generation->layout->elements() : 0;
  const std::chrono::duration<double> age = std::chrono::steady_clock::now() - served.published_at;
  out.add("version_served", "1 if there is a version to be pulled.", now.served ? 1 : 0);
  out.add("version_number", "Number of the version that is served.", static_cast<double>(served.version.id.number));
  out.add("version_age_seconds",
          "Time since the version that is served was published, or since this agent's start if it found it; 0: none.",
          now.served ? age.count() : 0);
  out.add("served_tiles_damaged", "Tiles of the version that is served whose bytes are not those that were offloaded.",
          static_cast<double>(served.damaged_tiles().size()));
  out.add("delta_density", "Part of all elements that the newest delta changed.",
          elements == 0 ? 0 : static_cast<double>(served.changed) / static_cast<double>(elements));
  out.add("encode_seconds", "What diff and encoding of the newest delta took.", served.encode_s);
  out.add("half_bytes", "Bytes of a half.", static_cast<double>(now.offer.full_bytes));
}

void add_ring(metrics::Gauges& out, const AgentParts& parts, const Snapshot& now) {
  out.add("connections", "Receivers' connections now.", static_cast<double>(parts.pull_server.connections()));
  out.add("leases", "Leases on halves now.", static_cast<double>(parts.core.leases().list().size()));
  std::uint64_t ring_bytes = 0;
  for (const RingEntryPtr& entry : now.ring) ring_bytes += entry->delta->frame_bytes;
  out.add("ring_bytes", "Bytes of deltas in the ring.", static_cast<double>(ring_bytes));
  out.add("ring_entries", "Deltas in the ring.", static_cast<double>(now.ring.size()));
  const DeltaBuilder::Info merges = parts.core.deltas().info();
  out.add("merged_bytes", "Bytes of merged and compact deltas that are kept.", static_cast<double>(merges.bytes));
  out.add("merged_entries", "Merged and compact deltas that are kept.", static_cast<double>(merges.entries.size()));
}

void add_certificate(metrics::Gauges& out, net::Tls* tls) {
  const auto end = tls != nullptr ? tls->certificates_end() : std::nullopt;
  if (!end) return;
  out.add("tls_certificate_not_after_timestamp_seconds", "Unix time at which the certificate ends to be valid.",
          std::chrono::duration<double>(end->time_since_epoch()).count());
}

}  // namespace

std::string metrics_text(const AgentParts& parts) {
  const SnapshotPtr now = parts.core.versions().snapshot();
  metrics::Gauges out;
  out.add("peer_memory_bytes", "Memory that peers make the agent hold, as it is computed.",
          static_cast<double>(parts.core.peer_room().bytes_taken()));
  out.add("writers", "Trainers' ranks, or relays, that are attached now.",
          static_cast<double>(writers_attached(parts)));
  std::vector<ReceiverStatus> receivers = receiver_status(parts);
  const auto since = cut_off(parts, receivers);
  out.add("cut_off_seconds",
          "For how long nobody has brought newer versions: the relay is gone, or has no agent that gets any, or the "
          "trainer went on elsewhere; 0: somebody may.",
          since ? std::chrono::duration<double>(Origin::Clock::now() - since->since).count() : 0);
  add_ring(out, parts, *now);
  add_served(out, *now);
  add_receivers(out, std::move(receivers));
  add_certificate(out, parts.tls);
  return metrics::to_text({parts.core.metrics().registry.collect(), out.take(), metrics::of_process()});
}

}  // namespace deltasync::agent
