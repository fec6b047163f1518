// A log that decodes encodes to the same bytes, up to what is torn at its end.
#include <algorithm>
#include <cstdlib>

#include "format/commit_log.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto log = commit::decode_log(bytes);
  if (!log) return 0;
  if (log->records.size() * commit::kLogRecordBytes + log->torn_bytes != size) std::abort();
  for (std::size_t i = 0; i < log->records.size(); ++i) {
    const commit::LogRecord again = commit::encode_record(log->records[i], i);
    const ByteSpan was = bytes.subspan(i * commit::kLogRecordBytes, commit::kLogRecordBytes);
    if (!std::equal(was.begin(), was.end(), bytes_of(again).begin())) std::abort();
  }
  if (commit::needed_records(log->records).size() > 4) std::abort();
  return 0;
}
