#include "receiver/targets/directory/hf_store.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/hash.hpp"
#include "base/log.hpp"
#include "format/file_name.hpp"
#include "receiver/targets/directory/disk_room.hpp"
#include "receiver/targets/directory/file_lease.hpp"

namespace deltasync {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kIncoming = ".incoming-";
constexpr unsigned kSameVersionMax = 10'000;  ///< directories of one version: far more than can be in use

std::string base_name(const VersionId& id) {
  char text[64];
  std::snprintf(text, sizeof text, "%016" PRIx64 "-%" PRIu64, id.epoch, id.number);
  return text;
}

/// True for the names that this code gives, so that nothing else in the directory is ever removed.
bool is_version_name(const std::string& name) {
  const auto digits = [&](std::size_t from, std::size_t to, const char* alphabet) {
    return from < to && name.find_first_not_of(alphabet, from) >= to;
  };
  if (name.size() < 18 || name[16] != '-' || !digits(0, 16, "0123456789abcdef")) return false;
  const std::size_t dot = name.find('.');
  if (dot == std::string::npos) return digits(17, name.size(), "0123456789");
  return digits(17, dot, "0123456789") && digits(dot + 1, name.size(), "0123456789");
}

/// <version name>.json.new
bool is_unfinished_record(const std::string& name) {
  constexpr std::string_view kEnd = ".json.new";
  return name.size() > kEnd.size() && name.ends_with(kEnd) &&
         is_version_name(name.substr(0, name.size() - kEnd.size()));
}

Status check_sidecar(const Sidecar& sidecar) {
  for (const Sidecar::File& file : sidecar.weights) DS_TRY(check_file_name(file.name));
  for (const Sidecar::File& file : sidecar.others) DS_TRY(check_file_name(file.name));
  return {};
}

/// Who loads `out` itself would go on loading what lies there, and never see a version.
Status check_no_model_of_others(const fs::path& out) {
  std::error_code error;
  if (fs::exists(out / DirectoryLock::kFileName, error)) return {};  // a target's own, and whatever came there later
  for (fs::directory_iterator entry(out, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path file = entry->path().filename();
    const bool weights = file.extension() == ".safetensors" || file.extension() == ".bin" || file.extension() == ".pth";
    if (!weights && file != "config.json") continue;
    return Error(
        Errc::already_exists,
        out.string() + " holds a model that no receiver put there (" + file.string() +
            "): a process that loads that directory would go on loading it. Name another directory, of which current "
            "is to be loaded, or say that versions may go beside that model (--beside-model)");
  }
  return {};
}

}  // namespace

HfStore::HfStore(LayoutPtr layout, Sidecar sidecar, std::vector<HfPlace> places, fs::path out, DirectoryLock lock,
                 HfTargetOptions options)
    : layout_(std::move(layout)),
      sidecar_(std::move(sidecar)),
      places_(std::move(places)),
      out_(std::move(out)),
      versions_(out_ / "versions"),
      lock_(std::move(lock)),
      files_digest_(xxh3_128(sidecar_.encode())),
      options_(options) {
  for (const Sidecar::File& file : sidecar_.weights) {
    std::uint64_t bytes = file.bytes.size();
    for (const std::uint32_t tensor : file.tensors) bytes += layout_->tensors()[tensor].bytes;
    weight_bytes_.push_back(bytes);
    version_bytes_ += bytes;
  }
  for (const Sidecar::File& file : sidecar_.others) version_bytes_ += file.bytes.size();
}

Result<HfStore> HfStore::open(LayoutPtr layout, Sidecar sidecar, fs::path out, HfTargetOptions options) {
  DS_TRY(check_sidecar(sidecar));
  if (options.keep_before == 0) {
    return Error(Errc::invalid_argument, "keep_before is 0: the version before the committed one is always kept");
  }
  DS_ASSIGN(std::vector<HfPlace> places, hf_places(*layout, sidecar));
  if (!options.beside_model) DS_TRY(check_no_model_of_others(out));
  DS_TRY(make_directories(out / "versions"));
  std::error_code error;
  const fs::file_status current = fs::symlink_status(out / "current", error);
  if (fs::exists(current) && !fs::is_symlink(current)) {
    return Error(Errc::already_exists, (out / "current").string() + " is in the way: it is no symbolic link");
  }
  DS_ASSIGN(DirectoryLock lock, DirectoryLock::acquire(out));
  return HfStore(std::move(layout), std::move(sidecar), std::move(places), std::move(out), std::move(lock), options);
}

std::vector<fs::path> HfStore::weight_paths(const fs::path& directory) const {
  std::vector<fs::path> paths;
  for (const Sidecar::File& file : sidecar_.weights) paths.push_back(directory / file.name);
  return paths;
}

// ---- writing -------------------------------------------------------------------------------------------------------

fs::path HfStore::incoming_path() {
  return versions_ / (std::string(kIncoming) + std::to_string(getpid()) + "-" + std::to_string(next_incoming_++));
}

Status HfStore::check_room() const {
  DS_ASSIGN(const DiskSpace space, disk_space(versions_));
  return check_disk_room(versions_, space, version_bytes_, options_.disk_reserve_bytes);
}

Result<fs::path> HfStore::make_incoming() {
  const fs::path incoming = incoming_path();
  const auto make = [&]() -> Status {
    DS_TRY(make_directories(incoming));
    for (const auto& file : sidecar_.weights) DS_TRY(make_directories((incoming / file.name).parent_path()));
    for (const auto& file : sidecar_.others) DS_TRY(make_directories((incoming / file.name).parent_path()));
    return {};
  };
  if (Status status = make(); !status.ok()) {
    remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

Status HfStore::write_other_files(const fs::path& incoming, const CallContext& until) const {
  for (const Sidecar::File& file : sidecar_.others) {
    DS_TRY(until.check("writing " + (incoming / file.name).string()));
    DS_TRY(write_new_file(incoming / file.name, file.bytes));
  }
  return {};
}

Result<std::vector<UniqueFd>> HfStore::create_weight_files(const fs::path& incoming, const CallContext& until) const {
  std::vector<UniqueFd> files;
  for (std::size_t i = 0; i < sidecar_.weights.size(); ++i) {
    DS_ASSIGN(UniqueFd fd, create_reserved(incoming / sidecar_.weights[i].name, weight_bytes_[i], until));
    files.push_back(std::move(fd));
  }
  return files;
}

Status HfStore::write_headers(const fs::path& incoming, const std::vector<UniqueFd>& files) const {
  for (std::size_t i = 0; i < files.size(); ++i) {
    DS_TRY(write_at(files[i].get(), 0, sidecar_.weights[i].bytes, incoming / sidecar_.weights[i].name));
  }
  return {};
}

Result<std::string> HfStore::free_name(const VersionId& id) const {
  const std::string base = base_name(id);
  std::string name = base;
  for (unsigned i = 1; i <= kSameVersionMax; ++i) {
    std::error_code error;
    if (!fs::exists(fs::symlink_status(versions_ / name, error))) return name;
    name = base + "." + std::to_string(i);
  }
  return Error(Errc::already_exists, "too many directories named " + (versions_ / base).string());
}

Status HfStore::flush_tree(const fs::path& directory) const {
  if (!options_.flush) return {};
  std::set<fs::path> directories = {directory};
  const auto flush_file = [&](const std::string& name) {
    for (fs::path p = fs::path(name).parent_path(); !p.empty(); p = p.parent_path()) directories.insert(directory / p);
    return flush_path(directory / name);
  };
  for (const Sidecar::File& file : sidecar_.weights) DS_TRY(flush_file(file.name));
  for (const Sidecar::File& file : sidecar_.others) DS_TRY(flush_file(file.name));
  for (const fs::path& path : directories) DS_TRY(flush_path(path));
  return {};
}

Result<std::string> HfStore::publish(const fs::path& incoming, const TargetState& state) {
  auto name = free_name(state.version.id);
  Status status = name.ok() ? flush_tree(incoming) : Status(name.error());
  if (status.ok()) status = rename_path(incoming, versions_ / *name);
  if (!status.ok()) {
    remove_tree(incoming);
    return std::move(status).error();
  }
  status = write_record(*name, state);
  if (status.ok() && options_.flush) status = flush_path(record_path(*name));
  if (status.ok() && options_.flush) status = flush_path(versions_);
  if (!status.ok()) {
    remove_version(*name);
    return std::move(status).error();
  }
  return name;
}

Result<fs::path> HfStore::take_apart(const std::string& name) {
  DS_ASSIGN(const fs::path incoming, make_incoming());
  const fs::path from = versions_ / name;
  ::unlink(record_path(name).c_str());
  const auto move_all = [&]() -> Status {
    for (const auto& file : sidecar_.weights) DS_TRY(rename_path(from / file.name, incoming / file.name));
    for (const auto& file : sidecar_.others) DS_TRY(rename_path(from / file.name, incoming / file.name));
    return {};
  };
  Status status = move_all();
  remove_tree(from);
  if (!status.ok()) {
    remove_tree(incoming);
    return std::move(status).error();
  }
  return incoming;
}

// ---- names ---------------------------------------------------------------------------------------------------------

std::optional<std::string> HfStore::current() const {
  std::error_code error;
  const fs::path to = fs::read_symlink(out_ / "current", error);
  if (error || to.parent_path() != "versions" || !is_version_name(to.filename().string())) return std::nullopt;
  return to.filename().string();
}

Status HfStore::point_current(const std::string& name) const {
  const fs::path fresh = out_ / ".current.new";
  ::unlink(fresh.c_str());  // left by a process that died here
  const fs::path to = fs::path("versions") / name;
  if (::symlink(to.c_str(), fresh.c_str()) != 0) return file_error("creating symbolic link", fresh, errno);
  if (Status status = rename_path(fresh, out_ / "current"); !status.ok()) {
    ::unlink(fresh.c_str());
    return status;
  }
  // The version is committed; that its link is not on the disk yet would show after a power failure only.
  if (Status status = options_.flush ? flush_path(out_) : Status(); !status.ok()) {
    log::warn("hf_target cannot_flush error=\"{}\"", status.error().to_string());
  }
  return {};
}

Status HfStore::clear_current() const {
  const fs::path link = out_ / "current";
  if (::unlink(link.c_str()) != 0 && errno != ENOENT) return file_error("removing", link, errno);
  return {};
}

Status HfStore::write_record(const std::string& name, const TargetState& state) const {
  const std::string text = encode_record({state.version, layout_->digest(), state.root, files_digest_});
  return replace_file(record_path(name), bytes_of(std::string_view(text)));
}

Result<HfRecord> HfStore::read_record(const std::string& name) const {
  DS_ASSIGN(const std::string text, read_small_file(record_path(name), kHfRecordBytesMax));
  return decode_record(text).with_context(record_path(name).string());
}

std::vector<std::string> HfStore::names() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(versions_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (is_version_name(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<fs::path> HfStore::unname(const std::string& name) {
  // Under its name the directory is whole or has no <name>.json, at every instant.
  ::unlink(record_path(name).c_str());
  fs::path doomed = incoming_path();
  if (::rename(directory(name).c_str(), doomed.c_str()) == 0) return doomed;
  if (errno != ENOENT) {
    log::warn("hf_target cannot_remove path={} error={}", directory(name).string(), std::strerror(errno));
  }
  return std::nullopt;
}

void HfStore::remove_version(const std::string& name) {
  if (const auto doomed = unname(name)) remove_tree(*doomed);
}

Status HfStore::remove_leftovers(const CallContext& until) {
  // The lock is ours, so no process writes here but this one, which has just begun.
  std::vector<std::string> incoming;
  std::vector<std::string> records;
  std::error_code error;
  for (fs::directory_iterator it(versions_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind(kIncoming, 0) == 0) incoming.push_back(name);
    if (it->path().extension() == ".json" && is_version_name(it->path().stem().string())) records.push_back(name);
    if (is_unfinished_record(name)) records.push_back(name);
  }
  for (const std::string& name : incoming) {
    log::info("hf_target removes_leftover name={}", name);
    DS_TRY(remove_tree(versions_ / name, until));
  }
  for (const std::string& name : names()) {
    if (!fs::exists(fs::symlink_status(record_path(name), error))) {
      log::info("hf_target removes_leftover name={}", name);
      if (const auto doomed = unname(name)) DS_TRY(remove_tree(*doomed, until));
    }
  }
  for (const std::string& record : records) {
    const fs::path path = versions_ / record;
    if (path.extension() == ".new" || !fs::exists(fs::symlink_status(versions_ / path.stem(), error))) {
      ::unlink(path.c_str());
    }
  }
  return {};
}

void HfStore::remove_unused(const std::set<std::string>& keep) {
  for (const std::string& name : names()) {
    if (keep.count(name) != 0) continue;
    std::vector<fs::path> files;  // not by the sidecar: the version may be of an older layout
    std::error_code error;
    // What a link leads to is somebody else's: neither leased nor removed.
    const bool link = fs::is_symlink(fs::symlink_status(directory(name), error));
    fs::recursive_directory_iterator it;
    if (!link) it = fs::recursive_directory_iterator(directory(name), error);
    for (const fs::recursive_directory_iterator end; !error && it != end; it.increment(error)) {
      if (it->is_regular_file(error)) files.push_back(it->path());
    }
    FileLeases leases;
    const auto state = FileLeases::acquire(files, leases);
    if (!state.ok() || *state == FileLeaseState::in_use) {
      log::debug("hf_target keeps_version_in_use name={}", name);
      continue;
    }
    remove_version(name);
  }
}

// ---- reading -------------------------------------------------------------------------------------------------------

Result<MappedModel> HfStore::map(const fs::path& directory, bool writable) const {
  MappedModel model;
  for (std::size_t i = 0; i < sidecar_.weights.size(); ++i) {
    const fs::path path = directory / sidecar_.weights[i].name;
    DS_ASSIGN(const UniqueFd fd, open_file(path, writable));
    DS_ASSIGN(const std::uint64_t bytes, file_bytes(fd.get(), path));
    if (bytes != weight_bytes_[i]) {
      return Error(Errc::corrupt,
                   path.string() + " has " + std::to_string(bytes) + " bytes, not " + std::to_string(weight_bytes_[i]));
    }
    DS_ASSIGN(FileMapping mapping, FileMapping::map(fd.get(), bytes, writable, path));
    model.push_back(std::move(mapping));
  }
  return model;
}

Status HfStore::check_files(const fs::path& directory, const MappedModel& model) const {
  for (std::size_t i = 0; i < model.size(); ++i) {
    const Sidecar::File& file = sidecar_.weights[i];
    if (std::memcmp(model[i].bytes().data(), file.bytes.data(), file.bytes.size()) != 0) {
      return Error(Errc::corrupt, (directory / file.name).string() + " has another header");
    }
  }
  for (const Sidecar::File& file : sidecar_.others) {
    if (!file_equals(directory / file.name, file.bytes)) {
      return Error(Errc::corrupt, (directory / file.name).string() + " is missing or has other contents");
    }
  }
  return {};
}

delta::TensorMemory HfStore::tensor_memory(const MappedModel& model, std::uint32_t tensor) const {
  const HfPlace& place = places_[tensor];
  return {model[place.file].bytes().data() + place.offset,
          static_cast<std::size_t>(layout_->tensors()[tensor].row_bytes())};
}

}  // namespace deltasync
