#include "agent/derive/build_delta.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"

namespace deltasync::agent {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// What was in the way may be gone the next time.
bool passes(const Error& error) {
  return error.code() == Errc::no_space || error.code() == Errc::cancelled;
}

}  // namespace

Result<RingEntryPtr> merge_chain(const DeltaBuild& build) {
  const Stopwatch watch;
  const DeltaKey& key = build.key;
  trace::Span span("merge", key.to, {{"steps", build.chain.size()}});
  std::vector<const delta::Delta*> deltas;
  deltas.reserve(build.chain.size());
  for (const RingEntryPtr& entry : build.chain) deltas.push_back(entry->delta.get());
  auto merged = delta::merge(*build.layout, deltas, build.options, build.pool);
  const double seconds = watch.seconds();
  const std::uint64_t bytes_max = std::min(build.chain_bytes, build.layout->half_bytes() - 1);
  if (!merged || !*merged || (*merged)->frame_bytes > bytes_max) {
    if (merged || merged.error().code() != Errc::cancelled) Metrics::add(build.metrics.merges_failed, 1);
    const std::string why = !merged    ? merged.error().to_string()
                            : !*merged ? "some tiles cannot be told without the version that it leads to"
                                       : "it is larger than the chain or a half";
    log::info("deltas_not_merged from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    if (!merged && passes(merged.error())) return std::move(merged).error();
    return RingEntryPtr();
  }
  const delta::Delta& d = **merged;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(build.metrics.merges, 1);
  Metrics::add(build.metrics.merge_bytes, d.frame_bytes);
  Metrics::add(build.metrics.merge_seconds, seconds);
  log::info("deltas_merged from={} to={} pieces={} bytes={} chain_bytes={} merge_s={:.4f}", to_string(key.from),
            to_string(key.to), build.chain.size(), d.frame_bytes, build.chain_bytes, seconds);
  return RingEntryPtr(RingEntry::make(std::move(**merged), build.chain.front()->from, build.chain.back()->to, seconds));
}

Result<RingEntryPtr> compact_delta(const DeltaBuild& build, const RingEntry& plain) {
  const Stopwatch watch;
  const DeltaKey& key = build.key;
  const delta::Delta& before = *plain.delta;
  trace::Span span("compact", key.to);
  auto made = delta::compact_from_target(*build.layout, before, build.options, build.pool);
  const double seconds = watch.seconds();
  if (!made || !*made || (*made)->frame_bytes >= before.frame_bytes) {
    if (made || made.error().code() != Errc::cancelled) Metrics::add(build.metrics.compacts_failed, 1);
    const std::string why = !made    ? made.error().to_string()
                            : !*made ? "the version that it leads to is not served any more"
                                     : "no tile is smaller in exponent classes";
    log::info("delta_not_compacted from={} to={} reason=\"{}\"", to_string(key.from), to_string(key.to), why);
    if (!made && passes(made.error())) return std::move(made).error();
    return RingEntryPtr();
  }
  const delta::Delta& d = **made;
  span.set({"bytes", d.frame_bytes});
  Metrics::add(build.metrics.compacts, 1);
  Metrics::add(build.metrics.compact_bytes, d.frame_bytes);
  Metrics::add(build.metrics.compact_seconds, seconds);
  log::info("delta_compacted from={} to={} bytes={} plain_bytes={} compact_s={:.4f}", to_string(key.from),
            to_string(key.to), d.frame_bytes, before.frame_bytes, seconds);
  return RingEntryPtr(RingEntry::make(std::move(**made), plain.from, plain.to, seconds));
}

}  // namespace deltasync::agent
