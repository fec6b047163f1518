// The names of this agent's files: which are looked at, and which are removed.
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <new>

#include "agent/core.hpp"
#include "base/log.hpp"
#include "shm/side_files.hpp"

namespace deltasync::agent {

namespace {
constexpr auto kNamesInterval = std::chrono::seconds(2);  ///< between two looks whether cleaners took names away
}  // namespace

/// Those that an agent before this one did not come to remove after their segment.
Status AgentCore::sweep_stray_deltas() {
  DS_ASSIGN(const auto strays, shm::find_stray_side_files(options_.shm_dir));
  std::size_t swept = 0;
  for (const shm::StraySideFile& stray : strays) {
    if (stray.agent_name == options_.name && ::unlink(stray.path.c_str()) == 0) ++swept;
  }
  if (swept != 0) log::info("kept_deltas_swept files={} reason=\"their segment is gone\"", swept);
  return {};
}

/// Who has the files open goes on, but nobody who comes later finds them: that is said once, of each.
void AgentCore::look_at_names_locked(std::chrono::steady_clock::time_point now) {
  if (now < names_at_) return;
  names_at_ = now + kNamesInterval;
  const auto look = [this](const std::filesystem::path& file, bool in_place, const char* without) {
    if (in_place || !nameless_.insert(file).second) return;
    log::warn(
        "name_removed file={} effect=\"{}; it is served on\" remedy=\"keep cleaners away: RemoveIPC=no in logind.conf, "
        "an x line in tmpfiles.d; docs/reference/cli.md\"",
        file.string(), without);
  };
  look(lock_->file(), lock_->in_place(), "another agent of this name can start");
  for (const GenerationPtr& generation : generations_) {
    const shm::SegmentPath& path = generation->segment->path();
    look(path.dir / path.name, generation->segment->in_place(), "an agent that is started again does not find it");
  }
}

AgentCore::Names AgentCore::names() const {
  Names names;
  names.lock_ = lock_;
  names.reclaimer_ = reclaimer_;
  return names;
}

void AgentCore::Names::remove() const noexcept {
  try {
    for (const GenerationPtr& generation : reclaimer_->all_held())
      static_cast<void>(generation->segment->remove_name());
  } catch (const std::bad_alloc&) {  // they stay, and the next agent of the name has them
  }
  lock_->remove();
}

void AgentCore::remove_segments() {
  lock_->remove_on_release();
  for (const GenerationPtr& generation : generations()) {
    if (auto removed = generation->segment->remove_name(); !removed) {
      log::warn("segment_remove_failed error=\"{}\"", removed.error().to_string());
    }
  }
}

}  // namespace deltasync::agent
