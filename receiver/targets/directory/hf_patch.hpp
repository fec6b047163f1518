// Steps applied to weight files: each tile that changes is read, stepped through, verified and written once.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "format/hf_files.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

struct PatchFile {
  int fd = -1;
  std::filesystem::path path;  ///< for messages
};

struct PatchRequest {
  const Layout& layout;
  const std::vector<HfPlace>& places;
  const std::vector<PatchFile>& files;   ///< by HfPlace::file
  std::vector<const StagedStep*> steps;  ///< oldest first
  /// Asked between groups of tiles; false ends the work with Errc::aborted.
  std::function<bool()> go_on;
  Deadline deadline;
};

/// `digests` are those of the files' tiles before, and after on success. Each record's digest is checked, so a file
/// that is not what `digests` says of a tile it touches is an error (corrupt). On any error the files are half patched:
/// worth nothing. Writes with pwrite, never through a mapping: a full disk is an error there and a signal here.
Status patch_files(const PatchRequest& request, std::vector<std::uint64_t>& digests, ThreadPool& pool);

}  // namespace deltasync
