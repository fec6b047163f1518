#include "agent/versions/agent_files.hpp"

#include <new>

#include "base/log.hpp"

namespace deltasync::agent {
namespace {

constexpr auto kNamesInterval = std::chrono::seconds(2);  ///< between two looks whether cleaners took names away

}  // namespace

void AgentFiles::look(const std::vector<GenerationPtr>& generations) {
  const auto now = std::chrono::steady_clock::now();
  if (now < look_at_) return;
  look_at_ = now + kNamesInterval;
  const auto look_at = [this](const std::filesystem::path& file, bool in_place, const char* without) {
    if (in_place || !nameless_.insert(file).second) return;
    log::warn(
        "name_removed file={} effect=\"{}; it is served on\" remedy=\"keep cleaners away: RemoveIPC=no in logind.conf, "
        "an x line in tmpfiles.d; docs/operating/installing.md\"",
        file.string(), without);
  };
  look_at(lock_->file(), lock_->in_place(), "another agent of this name can start");
  for (const GenerationPtr& generation : generations) {
    const shm::SegmentPath& path = generation->segment->path();
    look_at(path.dir / path.name, generation->segment->in_place(), "an agent that is started again does not find it");
  }
}

void AgentFiles::keep_source(const std::string& source) {
  if (source == lock_->note()) return;
  if (auto kept = lock_->write_note(source); !kept) {
    log::warn("source_not_kept error=\"{}\" effect=\"an agent that is started again does not say that it is cut off\"",
              kept.error().to_string());
  }
}

void AgentFiles::Names::remove() const noexcept {
  try {
    for (const GenerationPtr& generation : reclaimer_->all_held())
      static_cast<void>(generation->segment->remove_name());
  } catch (const std::bad_alloc&) {  // they stay, and the next agent of the name has them
  }
  lock_->remove();
}

void AgentFiles::remove(const std::vector<GenerationPtr>& generations) {
  remove_lock_at_end();
  for (const GenerationPtr& generation : generations) {
    if (auto removed = generation->segment->remove_name(); !removed) {
      log::warn("segment_remove_failed error=\"{}\"", removed.error().to_string());
    }
  }
}

}  // namespace deltasync::agent
