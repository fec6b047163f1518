#include "format/wire_report.hpp"

#include <algorithm>
#include <utility>

#include "format/wire_codec.hpp"

namespace deltasync::wire {

std::vector<std::byte> Report::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(receiver);
  put_version(out, committed);
  out.put_string(cut(error, kReportErrorBytesMax));
  return bytes;
}
Result<Report> Report::decode(ByteSpan payload) {
  Decoder in(payload, "report");
  Report m;
  m.receiver = in.get<std::uint64_t>();
  m.committed = in.version();
  m.error = in.string(kReportErrorBytesMax, "error");
  return in.finish(std::move(m));
}

std::vector<std::byte> GetLag::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version_id(out, held);
  return bytes;
}
Result<GetLag> GetLag::decode(ByteSpan payload) {
  Decoder in(payload, "get_lag");
  GetLag m;
  m.held = in.version_id();
  return in.finish(m);
}

std::vector<std::byte> Lag::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version(out, newest);
  out.put(versions);
  out.put(behind_ns);
  out.put(newest_age_ns);
  out.put(cut_off_ns);
  return bytes;
}
Result<Lag> Lag::decode(ByteSpan payload) {
  Decoder in(payload, "lag");
  Lag m;
  m.newest = in.version();
  m.versions = in.get<std::uint64_t>();
  m.behind_ns = in.get<std::uint64_t>();
  m.newest_age_ns = in.get<std::uint64_t>();
  m.cut_off_ns = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

std::vector<std::byte> KeepAlive::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(every_ms);
  return bytes;
}
Result<KeepAlive> KeepAlive::decode(ByteSpan payload) {
  Decoder in(payload, "keep_alive");
  KeepAlive m;
  m.every_ms = in.get<std::uint32_t>();
  return in.finish(m);
}

std::vector<std::byte> RelayTo::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(instance);
  out.put_string(cut(endpoint, kEndpointBytesMax));
  return bytes;
}
Result<RelayTo> RelayTo::decode(ByteSpan payload) {
  Decoder in(payload, "relay_to");
  RelayTo m;
  m.instance = in.get<std::uint64_t>();
  m.endpoint = in.string(kEndpointBytesMax, "endpoint");
  return in.finish(std::move(m));
}

std::vector<std::byte> Elsewhere::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  const std::size_t count = std::min<std::size_t>(endpoints.size(), kElsewhereMax);
  out.put<std::uint64_t>(count);
  for (std::size_t i = 0; i < count; ++i) out.put_string(cut(endpoints[i], kEndpointBytesMax));
  return bytes;
}
Result<Elsewhere> Elsewhere::decode(ByteSpan payload) {
  Decoder in(payload, "elsewhere");
  Elsewhere m;
  const auto count = in.get_at_most(kElsewhereMax, "count");
  for (std::uint64_t i = 0; i < count && !in.in().failed(); ++i) {
    m.endpoints.push_back(in.string(kEndpointBytesMax, "endpoint"));
  }
  return in.finish(std::move(m));
}

std::vector<std::byte> Parents::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  const std::size_t count = std::min<std::size_t>(list.size(), kParentsMax);
  out.put<std::uint64_t>(count);
  for (std::size_t i = 0; i < count; ++i) {
    out.put(list[i].instance);
    out.put_string(cut(list[i].endpoint, kEndpointBytesMax));
  }
  out.put(cut_off_ns);
  return bytes;
}
Result<Parents> Parents::decode(ByteSpan payload) {
  Decoder in(payload, "parents");
  Parents m;
  const auto count = in.get_at_most(kParentsMax, "count");
  for (std::uint64_t i = 0; i < count && !in.in().failed(); ++i) {
    const auto instance = in.get<std::uint64_t>();
    m.list.push_back({instance, in.string(kEndpointBytesMax, "endpoint")});
  }
  m.cut_off_ns = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}
Result<TrainerParents> TrainerParents::decode(ByteSpan payload) {
  DS_ASSIGN(Parents parents, Parents::decode(payload));
  return TrainerParents{{std::move(parents)}};
}

std::string cycle_of(const std::vector<Parent>& parents, std::uint64_t instance) {
  std::string way;
  for (const Parent& parent : parents) {
    way += (way.empty() ? "" : ", that from ") + (parent.endpoint.empty() ? "the agent" : parent.endpoint);
    if (parent.instance == instance) {
      return "a cycle of relays, in which no version ever comes: it pulls from " + way + ", which is its own agent";
    }
  }
  return {};
}

}  // namespace deltasync::wire
