// GET /metrics: what was counted, and what there is now.
#include "agent/metrics_page.hpp"

#include "base/metrics.hpp"

namespace deltasync::agent {
namespace {

void add_served(metrics::Gauges& out, const ServedVersion& served) {
  const std::uint64_t elements = served.generation ? served.generation->layout->elements() : 0;
  out.add("version_number", "Number of the version that is served.", static_cast<double>(served.version.id.number));
  out.add("delta_density", "Part of all elements that the newest delta changed.",
          elements == 0 ? 0 : static_cast<double>(served.changed) / static_cast<double>(elements));
  out.add("encode_seconds", "What diff and encoding of the newest delta took.", served.encode_s);
}

}  // namespace

std::string metrics_text(const AgentParts& parts) {
  const SnapshotPtr now = parts.core.snapshot();
  metrics::Gauges out;
  out.add("peer_memory_bytes", "Memory that peers make the agent hold, as it is reckoned.",
          static_cast<double>(parts.core.peer_room().bytes_taken()));
  out.add("connections", "Receivers' connections now.", static_cast<double>(parts.pull_server.connections()));
  out.add("leases", "Leases on halves now.", static_cast<double>(parts.core.leases().list().size()));
  std::uint64_t ring_bytes = 0;
  for (const RingEntryPtr& entry : now->ring) ring_bytes += entry->delta->frame_bytes;
  out.add("ring_bytes", "Bytes of deltas in the ring.", static_cast<double>(ring_bytes));
  out.add("ring_entries", "Deltas in the ring.", static_cast<double>(now->ring.size()));
  const AgentCore::MadeInfo merges = parts.core.made();
  out.add("merged_bytes", "Bytes of merged and compact deltas that are kept.", static_cast<double>(merges.bytes));
  out.add("merged_entries", "Merged and compact deltas that are kept.", static_cast<double>(merges.entries.size()));
  add_served(out, now->served ? *now->served : ServedVersion());
  out.add("half_bytes", "Bytes of a half.", static_cast<double>(now->offer.full_bytes));
  return metrics::to_text({parts.core.metrics().registry.collect(), out.take(), metrics::of_process()});
}

}  // namespace deltasync::agent
