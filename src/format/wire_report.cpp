#include "format/wire_report.hpp"

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
  return bytes;
}
Result<Lag> Lag::decode(ByteSpan payload) {
  Decoder in(payload, "lag");
  Lag m;
  m.newest = in.version();
  m.versions = in.get<std::uint64_t>();
  m.behind_ns = in.get<std::uint64_t>();
  m.newest_age_ns = in.get<std::uint64_t>();
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

}  // namespace deltasync::wire
