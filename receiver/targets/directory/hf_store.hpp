// The directory of the HF target on disk. Knows names and their order of creation, nothing about deltas:
//
//   out/current -> versions/<name>          the committed version; swapped in one step
//   out/versions/<name>/…                   exactly the files of a HF model, never written again
//   out/versions/<name>.json                what the directory holds; written when the directory is whole
//   out/versions/.incoming-<pid>-<n>/…      being written, patched or removed; nobody else's business
//   out/.deltasync.lock                     one receiver keeps the directory
//
// <name> is <epoch, 16 hex digits>-<number>, with ".1", ".2" … behind it when the same version is written again.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "format/hf_files.hpp"
#include "receiver/targets/directory/directory_lock.hpp"
#include "receiver/targets/directory/hf_files.hpp"
#include "receiver/targets/directory/hf_record.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// All weight files of one directory, mapped; in the order of Sidecar::weights.
using MappedModel = std::vector<FileMapping>;

class HfStore {
 public:
  /// Creates the directories, takes the lock. invalid_argument for a sidecar that does not fit the layout or names
  /// files outside its directory; already_exists if `out` is kept by somebody, or out/current is no symbolic link.
  static Result<HfStore> open(LayoutPtr layout, Sidecar sidecar, std::filesystem::path out,
                              HfTargetOptions options = {});

  const Layout& layout() const noexcept { return *layout_; }
  const Sidecar& sidecar() const noexcept { return sidecar_; }
  /// Of all that the sidecar says about a directory's files.
  const Digest128& files_digest() const noexcept { return files_digest_; }
  const std::vector<HfPlace>& places() const noexcept { return places_; }
  unsigned keep_before() const noexcept { return options_.keep_before; }
  std::uint64_t weight_bytes(std::size_t file) const noexcept { return weight_bytes_[file]; }
  std::filesystem::path directory(const std::string& name) const { return versions_ / name; }
  std::vector<std::filesystem::path> weight_paths(const std::filesystem::path& directory) const;

  // ---- writing ---------------------------------------------------------------------------------------------------

  /// no_space if one more version would not leave HfTargetOptions::disk_reserve_bytes free.
  Status check_room() const;
  /// An empty directory with the subdirectories that the sidecar's names need.
  Result<std::filesystem::path> make_incoming();
  Status write_other_files(const std::filesystem::path& incoming, const CallContext& until) const;
  /// Files of full size with all blocks reserved; nothing in them yet.
  Result<std::vector<UniqueFd>> create_weight_files(const std::filesystem::path& incoming,
                                                    const CallContext& until) const;
  Status write_headers(const std::filesystem::path& incoming, const std::vector<UniqueFd>& files) const;
  /// Flushes a whole incoming directory, renames it to its name and writes <name>.json. On failure it is removed.
  Result<std::string> publish(const std::filesystem::path& incoming, const TargetState& state);
  /// Moves the files of a version into a new incoming directory: a path or a directory handle of the old one finds
  /// nothing any more. On failure what was moved is removed.
  Result<std::filesystem::path> take_apart(const std::string& name);

  // ---- names -----------------------------------------------------------------------------------------------------

  /// Nothing, or the name that out/current leads to.
  std::optional<std::string> current() const;
  Status point_current(const std::string& name) const;
  Status clear_current() const;
  Result<HfRecord> read_record(const std::string& name) const;
  /// Names of all directories that look like versions, whole or not.
  std::vector<std::string> names() const;
  /// Removes a version's directory and its <name>.json. Readers that have its files open or mapped keep those.
  void remove_version(const std::string& name);
  /// Removes what a process that died has left: incoming directories, versions without <name>.json and the reverse.
  /// timed_out or cancelled: some are left for the next time.
  Status remove_leftovers(const CallContext& until);
  /// Removes the versions that are not in `keep` and that nobody has open or mapped (or all, where the filesystem
  /// cannot tell). The others wait for the next call.
  void remove_unused(const std::set<std::string>& keep);

  // ---- reading ---------------------------------------------------------------------------------------------------

  /// Maps the weight files; corrupt if one has not the size it must have.
  Result<MappedModel> map(const std::filesystem::path& directory, bool writable) const;
  /// Headers of the weight files and all other files are those of the sidecar.
  Status check_files(const std::filesystem::path& directory, const MappedModel& model) const;
  delta::TensorMemory tensor_memory(const MappedModel& model, std::uint32_t tensor) const;

 private:
  HfStore(LayoutPtr layout, Sidecar sidecar, std::vector<HfPlace> places, std::filesystem::path out, DirectoryLock lock,
          HfTargetOptions options);
  /// Files and directories of a whole version, to the disk. An error of an earlier write-back shows itself here.
  Status flush_tree(const std::filesystem::path& directory) const;
  Result<std::string> free_name(const VersionId& id) const;
  Status write_record(const std::string& name, const TargetState& state) const;
  std::filesystem::path record_path(const std::string& name) const { return versions_ / (name + ".json"); }
  std::filesystem::path incoming_path();
  /// Gives a version's directory the name of an incoming one; nothing if it is not there.
  std::optional<std::filesystem::path> unname(const std::string& name);

  LayoutPtr layout_;
  Sidecar sidecar_;
  std::vector<HfPlace> places_;
  std::vector<std::uint64_t> weight_bytes_;  ///< of each weight file, header included
  std::uint64_t version_bytes_ = 0;          ///< of all files
  std::filesystem::path out_;
  std::filesystem::path versions_;
  DirectoryLock lock_;
  Digest128 files_digest_;
  HfTargetOptions options_;
  std::uint64_t next_incoming_ = 0;
};

}  // namespace deltasync
