#include "format/commit_log.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/hash.hpp"

namespace deltasync::commit {
namespace {

std::uint64_t hash_of(const LogRecord& r) {
  return xxh3_64(bytes_of(r).first(offsetof(LogRecord, hash)));
}

/// A record whose hash is right.
std::optional<LogRecord> whole(ByteSpan bytes) {
  if (bytes.size() < kLogRecordBytes) return std::nullopt;
  const auto r = load<LogRecord>(bytes.data());
  if (r.magic != kLogMagic || r.hash != hash_of(r)) return std::nullopt;
  return r;
}

bool zeros(ByteSpan bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

Result<Record> decode_record(const LogRecord& r, std::uint64_t sequence) {
  const std::string name = "the coordinator's log: record " + std::to_string(sequence);
  if (r.sequence != sequence) return Error(Errc::corrupt, name + " says that it is " + std::to_string(r.sequence));
  if (r.kind < static_cast<std::uint16_t>(RecordKind::start) ||
      r.kind > static_cast<std::uint16_t>(RecordKind::finish)) {
    return Error(Errc::unsupported, name + ": kind " + std::to_string(r.kind));
  }
  if (r.label_bytes > kLabelBytesMax) return Error(Errc::corrupt, name + ": label of " + std::to_string(r.label_bytes));
  const bool rest_is_zero = r.reserved0 == 0 && r.reserved1 == 0 && zeros(bytes_of(r.reserved2)) &&
                            zeros(bytes_of(r.label).subspan(r.label_bytes));
  if (!rest_is_zero) return Error(Errc::corrupt, name + ": reserved bytes are not zero");
  Record record;
  record.kind = static_cast<RecordKind>(r.kind);
  record.log = r.log;
  record.term = r.term;
  record.ranks = r.ranks;
  record.transaction = {r.transaction_term, r.transaction_number};
  record.version = {{r.epoch, r.number}, std::string(r.label.data(), r.label_bytes)};
  return record;
}

}  // namespace

LogRecord encode_record(const Record& record, std::uint64_t sequence) {
  LogRecord r;
  r.kind = static_cast<std::uint16_t>(record.kind);
  r.label_bytes = static_cast<std::uint16_t>(std::min(record.version.label.size(), kLabelBytesMax));
  r.sequence = sequence;
  r.log = record.log;
  r.term = record.term;
  r.transaction_term = record.transaction.term;
  r.transaction_number = record.transaction.number;
  r.epoch = record.version.id.epoch;
  r.number = record.version.id.number;
  r.ranks = record.ranks;
  std::memcpy(r.label.data(), record.version.label.data(), r.label_bytes);
  r.hash = hash_of(r);
  return r;
}

Result<LogContents> decode_log(ByteSpan bytes) {
  LogContents out;
  std::size_t at = 0;
  for (; at < bytes.size(); at += kLogRecordBytes) {
    const auto r = whole(bytes.subspan(at));
    if (!r) break;
    DS_ASSIGN(Record record, decode_record(*r, out.records.size()));
    out.records.push_back(std::move(record));
  }
  if (at >= bytes.size()) return out;
  // A record is written when the one before it is durable: one that was being written is the last one.
  if (bytes.size() - at > kLogRecordBytes) {
    return Error(Errc::corrupt, "the coordinator's log: record " + std::to_string(out.records.size()) +
                                    " is damaged, and " + std::to_string(bytes.size() - at - kLogRecordBytes) +
                                    " bytes follow it");
  }
  out.torn_bytes = bytes.size() - at;
  return out;
}

std::vector<Record> needed_records(const std::vector<Record>& records) {
  std::optional<Record> start;
  std::optional<Record> open;                      // a commit without an end
  std::optional<std::pair<Record, Record>> ended;  // the last commit that has one
  Version group;                                   // what is served now
  Version before;                                  // what was served when `ended` was committed
  for (const Record& r : records) {
    switch (r.kind) {
      case RecordKind::start:
        start = r;
        if (r.version.id.valid()) group = r.version;
        break;
      case RecordKind::abort: break;
      case RecordKind::commit: open = r; break;
      case RecordKind::roll_back:
      case RecordKind::finish:
        if (!open) break;  // recover() refuses such a log
        before = group;
        if (r.kind == RecordKind::finish) group = open->version;
        ended.emplace(*std::exchange(open, std::nullopt), r);
        break;
    }
  }
  std::vector<Record> needed;
  if (!start) return needed;
  needed.push_back(*start);
  needed.back().version = ended ? before : group;
  if (ended) needed.insert(needed.end(), {ended->first, ended->second});
  if (open) needed.push_back(*open);
  for (Record& r : needed) r.term = start->term;  // as if all had been written after that start
  return needed;
}

}  // namespace deltasync::commit
