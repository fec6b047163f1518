// The log of a coordinator of two-phase commit: records of 256 bytes, one after the other, each with its place and a
// hash of its own. No I/O here: src/commit/log_file has the file. commit_protocol.md is normative.
//
//   0        4      6      8               16              24              32              40              56
//   +--------+------+------+---------------+---------------+---------------+---------------+---------------+
//   | magic  | kind | label|   sequence    |      log      |     term      |  transaction: term, number    |
//   |        |      | bytes|               |               |               |                               |
//   +--------+------+------+---------------+---------------+---------------+---------------+---------------+
//   56              64              72       76       80                      208             248            256
//   +---------------+---------------+--------+--------+-----------------------+---------------+--------------+
//   | version: epoch|    number     | ranks  | zero   |  label, then zeros    |     zeros     |     hash     |
//   +---------------+---------------+--------+--------+-----------------------+---------------+--------------+
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/result.hpp"
#include "format/commit_messages.hpp"

namespace deltasync::commit {

inline constexpr std::uint32_t kLogMagic = 0x31435344;  // "DSC1"

struct LogRecord {
  std::uint32_t magic = kLogMagic;
  std::uint16_t kind = 0;
  std::uint16_t label_bytes = 0;
  std::uint64_t sequence = 0;  ///< of the record in its file, from 0
  std::uint64_t log = 0;
  std::uint64_t term = 0;
  std::uint64_t transaction_term = 0;
  std::uint64_t transaction_number = 0;
  std::uint64_t reserved0 = 0;
  std::uint64_t epoch = 0;
  std::uint64_t number = 0;
  std::uint32_t ranks = 0;
  std::uint32_t reserved1 = 0;
  std::array<char, 128> label{};
  std::array<std::uint8_t, 40> reserved2{};
  std::uint64_t hash = 0;  ///< XXH3-64 of the bytes before it
};
static_assert(sizeof(LogRecord) == 256 && std::has_unique_object_representations_v<LogRecord>);
static_assert(offsetof(LogRecord, sequence) == 8 && offsetof(LogRecord, transaction_term) == 32 &&
              offsetof(LogRecord, epoch) == 56 && offsetof(LogRecord, ranks) == 72 &&
              offsetof(LogRecord, label) == 80 && offsetof(LogRecord, reserved2) == 208 &&
              offsetof(LogRecord, hash) == 248);
static_assert(kLabelBytesMax <= 128);

inline constexpr std::size_t kLogRecordBytes = sizeof(LogRecord);
inline constexpr std::uint64_t kLogBytesMax = 64u << 20;  ///< nobody writes so large a one

LogRecord encode_record(const Record& record, std::uint64_t sequence);

struct LogContents {
  std::vector<Record> records;
  std::uint64_t torn_bytes = 0;  ///< at the end: a record that was being written when its writer died
};
/// corrupt: a bad record with good ones behind it, or good bytes that say nothing sensible. A bad end is no error: it
/// was never durable, so nobody was told of it.
Result<LogContents> decode_log(ByteSpan bytes);

/// The records that a log still needs: the last start, the last transaction that was committed and has ended, and the
/// one that is open.
std::vector<Record> needed_records(const std::vector<Record>& records);

}  // namespace deltasync::commit
