// The coordinator's log on disk. A record that append() returned for survives a power failure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "deltasync/result.hpp"
#include "format/commit_messages.hpp"

namespace deltasync::commit {

/// Kept by one process at a time, and by one object in it.
class LogFile {
 public:
  /// Makes the file if it is not there. Leaves out what is torn at its end, and the records that nobody needs any more.
  /// Symbolic links are followed once. already_exists: another process has it; corrupt: a damaged record that others
  /// follow; not_found: a link to nothing.
  static Result<std::unique_ptr<LogFile>> open(const std::filesystem::path& given);
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  ~LogFile();

  const std::vector<Record>& records() const noexcept { return records_; }
  std::uint64_t torn_bytes() const noexcept { return torn_bytes_; }

  /// Durable when it returns, in the file that has the log's name. After an error nobody knows whether the record is
  /// there: the file takes no more. Looks before and after whether it is still_ours().
  Status append(const Record& record);
  /// io: the log or its lock was removed, or another file has its name now, and with it perhaps another coordinator.
  Status still_ours() const;

 private:
  explicit LogFile(std::filesystem::path path) : path_(std::move(path)) {}
  Status lock();
  Status read();
  Status rewrite();

  std::filesystem::path path_;
  std::string key_;  ///< in the process's table of logs
  UniqueFd lock_;
  UniqueFd file_;
  std::vector<Record> records_;
  std::uint64_t torn_bytes_ = 0;
  bool failed_ = false;
};

}  // namespace deltasync::commit
