#include "agent/versions/ring_keeper.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include "agent/background.hpp"
#include "agent/versions/kept_delta.hpp"
#include "base/log.hpp"
#include "shm/side_files.hpp"

namespace deltasync::agent {
namespace {

constexpr auto kAdoptLimit = std::chrono::seconds(5);  ///< for the thread to end what it is at

namespace fs = std::filesystem;

/// One whose state was repaired later is nothing that a few bytes in a file could describe.
bool can_be_kept(const RingEntry& entry) {
  return !entry.partial && entry.from_former.empty();
}

/// The newest of the ring that together have `bytes_max`, newest first, as far back as each can be kept: without those
/// after it, one leads nowhere.
std::vector<RingEntryPtr> chain_back(const std::vector<RingEntryPtr>& ring, std::uint64_t bytes_max) {
  std::vector<RingEntryPtr> chain;
  std::uint64_t bytes = 0;
  for (auto entry = ring.rbegin(); entry != ring.rend() && can_be_kept(**entry); ++entry) {
    bytes += (*entry)->bytes();
    if (bytes > bytes_max) break;
    chain.push_back(*entry);
  }
  return chain;
}

/// A new file, whole or not there, if `reserve` bytes are left beside it. already_exists: the name is taken.
Status write_entry(const fs::path& path, const RingEntry& entry, std::uint64_t reserve,
                   const std::function<bool()>& over) {
  const std::vector<std::byte> head = kept_delta_head(entry);
  std::vector<ByteSpan> pieces{head};
  for (const delta::Frame& frame : entry.delta->frames) pieces.emplace_back(frame.bytes);
  return shm::write_side_file(path, pieces, reserve, over);
}

}  // namespace

void RingKeeper::start() {
  thread_ = start_background("keep-ring", 1, [this](ThreadPool&) { work(); });
}

void RingKeeper::stop(std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    end_.reset();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::optional<Wanted> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(wanted_);
    end_ = Deadline::after(limit);
  }
  if (rest) follow(*rest);
}

void RingKeeper::keep(const shm::SegmentPath& segment, std::vector<RingEntryPtr> ring, std::uint64_t bytes_max) {
  std::optional<Wanted> before;  // destroyed after the lock
  {
    const std::lock_guard lock(mutex_);
    before = std::exchange(wanted_, Wanted{segment, std::move(ring), bytes_max});
  }
  changed_.notify_all();
}

void RingKeeper::forget() {
  std::optional<Wanted> before;
  const std::lock_guard lock(mutex_);
  before.swap(wanted_);
}

void RingKeeper::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || wanted_; });
    if (stop_) return;
    std::optional<Wanted> now = std::exchange(wanted_, std::nullopt);
    busy_ = true;
    lock.unlock();
    follow(*now);
    lock.lock();
    if (stop_ && !wanted_) wanted_.swap(now);  // it may have left something
    lock.unlock();
    now.reset();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void RingKeeper::follow(const Wanted& wanted) noexcept {
  try {
    write_chain(wanted);
  } catch (const std::exception& e) {
    log::warn("kept_deltas_failed error=\"{}\"", e.what());
  }
}

void RingKeeper::write_chain(const Wanted& wanted) {
  if (const fs::path segment = wanted.segment.dir / wanted.segment.name; segment != kept_) {
    files_.clear();
    kept_ = segment;
  }
  const std::vector<RingEntryPtr> chain = chain_back(wanted.ring, wanted.bytes_max);
  const auto is_wanted = [&](const std::weak_ptr<const RingEntry>& file) {
    const RingEntryPtr entry = file.lock();
    return entry && std::find(chain.begin(), chain.end(), entry) != chain.end();
  };
  std::erase_if(files_, [&](const auto& file) {
    if (is_wanted(file.first)) return false;
    ::unlink(file.second.c_str());
    return true;
  });
  for (const RingEntryPtr& entry : chain) {
    if (!files_.contains(entry) && !write(wanted, entry)) return;
  }
}

bool RingKeeper::must_end() {
  const std::lock_guard lock(mutex_);
  return stop_ && (!end_ || end_->passed());
}

bool RingKeeper::write(const Wanted& wanted, const RingEntryPtr& entry) {
  if (must_end()) return false;
  Status status;
  fs::path path;
  for (;; ++next_) {
    path = shm::side_file_path(wanted.segment, next_);
    status = write_entry(path, *entry, wanted.bytes_max, [this] { return must_end(); });
    if (status || status.error().code() != Errc::already_exists) break;
  }
  // Who removes a segment removes it first and then its side files: one of the two sees this one.
  if (std::error_code ignored; status && !fs::exists(kept_, ignored)) {
    ::unlink(path.c_str());
    return false;
  }
  if (status) {
    ++next_;
    files_.emplace(entry, std::move(path));
    refused_ = false;
    return true;
  }
  if (status.error().code() == Errc::cancelled) return false;
  if (!refused_) {
    log::warn("kept_deltas_refused error=\"{}\" effect=\"after a restart receivers pull the whole model\"",
              status.error().to_string());
  }
  refused_ = true;
  return false;
}

std::vector<RingEntryPtr> RingKeeper::adopt(const shm::SegmentPath& segment, const Layout& layout,
                                            const VersionId& version, const Digest128& root,
                                            const std::vector<std::uint64_t>& digests) {
  {
    std::unique_lock lock(mutex_);  // it may be at files of a segment that is no more
    if (!changed_.wait_for(lock, kAdoptLimit, [this] { return !busy_; })) {
      log::warn("kept_deltas_ignored reason=\"the thread that keeps them is still busy\"");
      return {};  // what is the thread's own stays so
    }
  }
  files_.clear();
  kept_ = segment.dir / segment.name;
  std::vector<RingEntryPtr> read;
  std::vector<fs::path> paths;  // of these
  std::size_t ignored = 0;
  std::string reason;
  const auto ignore = [&](const fs::path& path, const std::string& why) {
    if (ignored++ == 0) reason = path.filename().string() + ": " + why;
    ::unlink(path.c_str());
  };
  for (const shm::SideFile& file : shm::find_side_files(segment)) {
    next_ = std::max(next_, file.number + 1);
    if (auto kept = read_kept_delta(file.path, layout); kept) {
      read.push_back(entry_of(std::move(*kept)));
      paths.push_back(file.path);
    } else {
      ignore(file.path, kept.error().to_string());
    }
  }
  std::vector<RingEntryPtr> chain = chain_to(version, root, digests, read);
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (std::find(chain.begin(), chain.end(), read[i]) != chain.end()) {
      files_.emplace(read[i], paths[i]);
    } else {
      ignore(paths[i], "it does not lead to the version that is served");
    }
  }
  if (ignored != 0) log::warn("kept_deltas_ignored files={} first=\"{}\"", ignored, reason);
  if (!chain.empty()) {
    log::info("kept_deltas_adopted deltas={} from=\"{}\" to=\"{}\"", chain.size(), to_string(chain.front()->from),
              to_string(chain.back()->to));
  }
  return chain;
}

}  // namespace deltasync::agent
