// `deltasync clean`: segments that no agent and no writer has any more, and kept deltas that have no segment.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "format/segment.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"
#include "shm/side_files.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

namespace fs = std::filesystem;

struct CleanArgs {
  std::string shm_dir = "/dev/shm";
  std::string name;
  bool remove = false;
  bool json = false;
};

/// A file, and why it is not to be removed.
struct Found {
  const char* kind = "segment";
  std::string file;
  std::string agent_name;
  std::uint64_t bytes = 0;
  std::string newest;   ///< version; empty if there is none
  std::string used_by;  ///< empty: nobody has it
  bool removed = false;
};

bool begins_as_segment(const fs::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) return false;
  std::ifstream file(path, std::ios::binary);
  std::uint64_t magic = 0;
  return file.read(reinterpret_cast<char*>(&magic), sizeof magic) && magic == shm::kSegmentMagic;
}

/// A process of that pid, which may be another one by now: then the segment stays.
bool runs(std::int32_t pid) {
  const auto id = ProcessId::of(pid);
  return id ? !proved_dead(*id) : id.error().code() != Errc::not_found;
}

std::string writer_of(shm::Segment& segment) {
  for (unsigned slot = 0; slot < shm::kSlotsMax; ++slot) {
    const auto status = shm::inspect_slot(segment, slot);
    if (status.pid != 0 && runs(status.pid)) return "writer pid " + std::to_string(status.pid);
  }
  return {};
}

std::string newest_of(shm::Segment& segment) {
  const Version newest = shm::inspect_newest(segment);
  return newest.id.valid() ? to_string(newest) : std::string();
}

/// Looks at one segment, under its agent's lock, and removes it if nobody has it and that is asked for.
Result<Found> look_at(const fs::path& dir, const std::string& file, const std::string& agent_name, bool remove) {
  Found found;
  found.file = file;
  found.agent_name = agent_name;
  std::error_code ignored;
  found.bytes = fs::file_size(dir / file, ignored);
  auto lock = shm::AgentLock::acquire(dir, agent_name);
  if (!lock) {
    if (lock.error().code() != Errc::already_exists) return std::move(lock).error();
    found.used_by = "its agent";
    return found;
  }
  lock->remove_on_release();
  if (auto segment = shm::Segment::attach({dir, file}); segment) {
    found.newest = newest_of(**segment);
    found.used_by = writer_of(**segment);
  } else if (segment.error().code() == Errc::permission) {
    found.used_by = segment.error().message();
  }  // else: one that was never whole, or of another release; its agent is gone
  if (remove && found.used_by.empty()) {
    DS_TRY(shm::Segment::unlink({dir, file}));
    found.removed = true;
  }
  return found;
}

/// The same of a kept delta without its segment. Under the lock nobody makes one: it is stray for good.
Result<Found> look_at_stray(const fs::path& dir, const shm::StraySideFile& stray, bool remove) {
  Found found;
  found.kind = "kept_delta";
  found.file = stray.path.filename().string();
  found.agent_name = stray.agent_name;
  std::error_code error;
  found.bytes = fs::file_size(stray.path, error);
  auto lock = shm::AgentLock::acquire(dir, stray.agent_name);
  if (!lock) {
    if (lock.error().code() != Errc::already_exists) return std::move(lock).error();
    found.used_by = "its agent";
    return found;
  }
  lock->remove_on_release();
  if (!remove) return found;
  found.removed = fs::remove(stray.path, error);
  if (error) return Error::from_errno("remove " + stray.path.string(), error.value());
  return found;
}

Status print(const Found& found, bool json) {
  if (json) {
    return print_json({{"event", found.kind},
                       {"file", found.file},
                       {"name", found.agent_name},
                       {"bytes", found.bytes},
                       {"version", found.newest},
                       {"used_by", found.used_by},
                       {"removed", found.removed}});
  }
  const std::string what = found.removed           ? "removed"
                           : found.used_by.empty() ? "left behind"
                                                   : "used by " + found.used_by;
  return print_line(found.file + ": " + human_bytes(found.bytes) +
                    (found.newest.empty() ? "" : ", version " + found.newest) + ", " + what);
}

Status run_clean(const CleanArgs& options) {
  const fs::path dir = options.shm_dir;
  std::error_code error;
  std::vector<std::string> files;
  for (fs::directory_iterator it(dir, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    files.push_back(it->path().filename().string());
  }
  if (error) return Error::from_errno(dir.string(), error.value());
  std::sort(files.begin(), files.end());
  std::size_t left = 0;
  for (const std::string& file : files) {
    const auto name = shm::agent_of_segment(file);
    if (!name || (!options.name.empty() && *name != options.name) || !begins_as_segment(dir / file)) continue;
    DS_ASSIGN(const Found found, look_at(dir, file, *name, options.remove).with_context(file));
    DS_TRY(print(found, options.json));
    left += found.used_by.empty() && !found.removed ? 1 : 0;
  }
  DS_ASSIGN(const auto strays, shm::find_stray_side_files(dir));
  for (const shm::StraySideFile& stray : strays) {
    if (!options.name.empty() && stray.agent_name != options.name) continue;
    DS_ASSIGN(const Found found,
              look_at_stray(dir, stray, options.remove).with_context(stray.path.filename().string()));
    DS_TRY(print(found, options.json));
    left += found.used_by.empty() && !found.removed ? 1 : 0;
  }
  if (left > 0 && !options.json) return print_line("`deltasync clean --remove` removes what was left behind");
  return {};
}

}  // namespace

std::function<Status()> setup_clean(CLI::App& app) {
  auto options = std::make_shared<CleanArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("--shm-dir", options->shm_dir, "where segments live")->capture_default_str()->type_name("DIR");
  app.add_option("--name", options->name, "only those of the agent of this name")->type_name("NAME");
  app.add_flag("--remove", options->remove, "remove those that no agent and no writer has");
  app.add_flag("--json", options->json, "one JSON object a line");
  return [options] { return run_clean(*options); };
}

}  // namespace deltasync::cli
