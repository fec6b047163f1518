#include "shm/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <boost/interprocess/file_mapping.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/fd.hpp"
#include "base/file_name.hpp"
#include "base/fork_guard.hpp"
#include "base/hash.hpp"
#include "base/user.hpp"
#include "shm/boot.hpp"
#include "shm/huge_pages.hpp"
#include "shm/side_files.hpp"
#include "shm/space.hpp"
#include "shm/validate.hpp"

namespace deltasync::shm {
namespace bip = boost::interprocess;

namespace {

std::filesystem::path file_of(const SegmentPath& path) {
  return path.dir / path.name;
}

/// Files directly under /dev/shm are POSIX shared memory objects; anything else is an ordinary file.
bool is_posix_shm(const SegmentPath& path) {
  return path.dir.lexically_normal() == std::filesystem::path("/dev/shm");
}

Error from_boost(const std::string& what, const bip::interprocess_exception& e) {
  if (e.get_native_error() != 0) return Error::from_errno(what, e.get_native_error());
  return {Errc::io, what + ": " + e.what()};
}

/// Removes a half-made segment unless it was finished.
class UnlinkOnFailure {
 public:
  explicit UnlinkOnFailure(std::filesystem::path file) : file_(std::move(file)) {}
  UnlinkOnFailure(const UnlinkOnFailure&) = delete;
  UnlinkOnFailure& operator=(const UnlinkOnFailure&) = delete;
  ~UnlinkOnFailure() {
    if (!kept_) ::unlink(file_.c_str());
  }
  void keep() noexcept { kept_ = true; }

 private:
  std::filesystem::path file_;
  bool kept_ = false;
};

Result<UniqueFd> create_file(const SegmentPath& path) {
  const auto file = file_of(path);
  const auto exists = [&] {
    return Error(Errc::already_exists, file.string() + " exists already" + describe_stranger(file));
  };
  if (is_posix_shm(path)) {
    try {
      // The object's own descriptor closes with it; the name stays.
      const bip::shared_memory_object object(bip::create_only, path.name.c_str(), bip::read_write,
                                             bip::permissions(0600));
    } catch (const bip::interprocess_exception& e) {
      if (e.get_error_code() == bip::already_exists_error) return exists();
      return from_boost("create " + file.string(), e);
    }
    UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd) return Error::from_errno("open " + file.string(), errno);
    return fd;
  }
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd && errno == EEXIST) return exists();
  if (!fd) return Error::from_errno("create " + file.string(), errno);
  return fd;
}

/// Every page of the file, mapped at `base` and touched by nobody yet, so that a full file system is an error here and
/// never a SIGBUS later. An errno, or 0.
int take_pages(int fd, std::byte* base, std::uint64_t bytes) {
  if (bytes >= kHugeBytesMin) fill_with_huge_pages(fd, base, 0, bytes);
  return reserve_pages(bytes, [&](std::uint64_t offset, std::uint64_t piece) {
    return ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(piece));
  });
}

/// All pages now. `base` is where the file is mapped.
Status reserve(int fd, std::byte* base, const SegmentPath& path, const SegmentPlan& plan) {
  const std::uint64_t bytes = plan.segment_bytes;
  int error = ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0) error = take_pages(fd, base, bytes);
  if (error == 0) return {};
  auto room = check_room(path.dir, bytes);  // somebody else may have taken the space meanwhile: name the figures
  if (!room) return std::move(room).error();
  return Error::from_errno("reserve " + bytes_for_people(bytes) + " for " + file_of(path).string(), error);
}

/// Maps the file behind `fd`, whatever has its name by now.
Result<bip::mapped_region> map(int fd, const SegmentPath& path, std::uint64_t bytes) {
  const auto map_at = [&](const void* address) {
    const bip::file_mapping object(("/proc/self/fd/" + std::to_string(fd)).c_str(), bip::read_write);
    return bip::mapped_region(object, bip::read_write, 0, bytes, address);
  };
  try {
    if (void* hint = aligned_hint(bytes)) {
      try {
        return map_at(hint);
      } catch (const bip::interprocess_exception&) {
        // another thread took the range meanwhile: any address will do
      }
    }
    return map_at(nullptr);
  } catch (const bip::interprocess_exception& e) {
    return from_boost("map " + file_of(path).string(), e);
  }
}

/// A child of fork() must not inherit the mapping: a forked data loader would keep a dead trainer's memory alive.
void advise(const bip::mapped_region& region) {
  ::madvise(region.get_address(), region.get_size(), MADV_DONTFORK);
  ::madvise(region.get_address(), region.get_size(), MADV_HUGEPAGE);
}

}  // namespace

struct Segment::Impl {
  ForkGuard fork_guard;
  SegmentPath path;
  UniqueFd fd;
  bip::mapped_region region;

  std::byte* base() const noexcept { return static_cast<std::byte*>(region.get_address()); }
  ControlBlock& block() const noexcept { return *reinterpret_cast<ControlBlock*>(base()); }
};

Status check_segment_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  bool good = !name.empty() && name.size() <= 200 && name.front() != '.';
  for (const char c : name) good = good && allowed(c);
  if (good) return {};
  return Error(
      Errc::invalid_argument,
      "segment name '" + name + "': letters, digits, '.', '_', '-', not starting with a dot, 200 bytes at most");
}

Result<std::unique_ptr<Segment>> Segment::create(const SegmentPath& path, std::uint64_t generation,
                                                 const Geometry& geometry, ByteSpan layout_encoded,
                                                 ByteSpan sidecar_encoded) {
  DS_TRY(check_segment_name(path.name));
  const auto what = "create segment " + file_of(path).string();
  const std::uint64_t half_bytes = geometry.half_bytes;
  const auto plan = plan_segment(half_bytes, layout_encoded.size(), sidecar_encoded.size(), geometry.batches);
  if (!plan) return Error(Errc::out_of_range, what + ": a half of " + bytes_for_people(half_bytes) + " is too large");
  DS_TRY(check_room(path.dir, plan->segment_bytes).with_context(what));

  DS_ASSIGN(auto fd, create_file(path));
  UnlinkOnFailure guard(file_of(path));
  // The mode given at creation passes through the umask, which may take more away but must not.
  if (::fchmod(fd.get(), 0600) != 0) return Error::from_errno("chmod " + file_of(path).string(), errno);
  mark_boot(fd.get());
  // Mapped, but not touched before every page is there.
  DS_ASSIGN(auto region, map(fd.get(), path, plan->segment_bytes));
  advise(region);
  DS_TRY(reserve(fd.get(), static_cast<std::byte*>(region.get_address()), path, *plan).with_context(what));

  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->fd = std::move(fd);
  impl->region = std::move(region);

  auto& block = impl->block();
  auto& header = block.header;
  header.magic = kSegmentMagic;
  header.format = kSegmentFormat;
  header.control_bytes = static_cast<std::uint32_t>(kControlBytes);
  header.segment_bytes = plan->segment_bytes;
  header.generation = generation;
  header.half_bytes = half_bytes;
  header.layout_offset = plan->layout_offset;
  header.layout_bytes = layout_encoded.size();
  header.sidecar_offset = plan->sidecar_offset;
  header.sidecar_bytes = sidecar_encoded.size();
  header.progress_offset = plan->progress_offset;
  header.progress_words = geometry.batches;
  std::memcpy(header.layout_digest, geometry.layout_digest.bytes.data(), sizeof(header.layout_digest));
  auto* base = impl->base();
  if (!layout_encoded.empty()) std::memcpy(base + plan->layout_offset, layout_encoded.data(), layout_encoded.size());
  if (!sidecar_encoded.empty()) {
    std::memcpy(base + plan->sidecar_offset, sidecar_encoded.data(), sidecar_encoded.size());
  }
  header.metadata_hash = metadata_hash(header, base);
  for (unsigned h = 0; h < kHalves; ++h) {
    header.half_offset[h] = plan->half_offset[h];
    block.state[h].word = HalfWord{HalfState::free, 0}.pack();
  }
  header.header_hash = header_hash(header);
  for (auto& slot : block.slot) slot.phase = PhaseWord{Phase::idle, 0}.pack();
  // SYNC POINT ready (release): attach: ready (acquire). Without it an attacher could see a header in the making.
  std::atomic_ref<std::uint64_t>(block.ready.word).store(kSegmentReady, std::memory_order_release);
  guard.keep();
  return std::unique_ptr<Segment>(new Segment(std::move(impl)));
}

Result<std::unique_ptr<Segment>> Segment::attach(const SegmentPath& path) {
  DS_TRY(check_segment_name(path.name));
  UniqueFd fd(::open(file_of(path).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return Error::from_errno("segment " + file_of(path).string() + describe_stranger(file_of(path)), errno);
  return attach(std::move(fd), path);
}

Result<std::unique_ptr<Segment>> Segment::attach(UniqueFd fd, const SegmentPath& path) {
  DS_TRY(check_segment_name(path.name));
  const auto what = "segment " + file_of(path).string();
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return Error::from_errno(what, errno);
  DS_TRY(check_file(st).with_context(what));

  DS_ASSIGN(auto region, map(fd.get(), path, static_cast<std::uint64_t>(st.st_size)));
  advise(region);
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->fd = std::move(fd);
  impl->region = std::move(region);
  DS_TRY(check_control(impl->base(), static_cast<std::uint64_t>(st.st_size)).with_context(what));
  return std::unique_ptr<Segment>(new Segment(std::move(impl)));
}

Status Segment::unlink(const SegmentPath& path) {
  DS_TRY(check_segment_name(path.name));
  if (::unlink(file_of(path).c_str()) != 0) return Error::from_errno("remove segment " + file_of(path).string(), errno);
  remove_side_files(path);
  return {};
}

Status Segment::remove_name() {
  return in_place() ? unlink(path()) : Status();
}

bool Segment::in_place() const {
  return is_name_of(file_of(path()), file());
}

Segment::Segment(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Segment::~Segment() {
  if (impl_->fork_guard.same_process()) return;
  // A forked child does not have the mapping: something else may lie at the mapping's address there.
  impl_->fd.reset();
  static_cast<void>(impl_.release());
}

ControlBlock& Segment::control() noexcept {
  return impl_->block();
}
const ControlBlock& Segment::control() const noexcept {
  return impl_->block();
}
const SegmentPath& Segment::path() const noexcept {
  return impl_->path;
}
std::uint64_t Segment::generation() const noexcept {
  return control().header.generation;
}
Digest128 Segment::layout_digest() const noexcept {
  Digest128 digest;
  std::memcpy(digest.bytes.data(), control().header.layout_digest, digest.bytes.size());
  return digest;
}
ByteSpan Segment::layout_encoded() const noexcept {
  const auto& header = control().header;
  return {impl_->base() + header.layout_offset, header.layout_bytes};
}
ByteSpan Segment::sidecar_encoded() const noexcept {
  const auto& header = control().header;
  return {impl_->base() + header.sidecar_offset, header.sidecar_bytes};
}
std::uint64_t Segment::half_bytes() const noexcept {
  return control().header.half_bytes;
}
MutByteSpan Segment::half(unsigned index) noexcept {
  return {impl_->base() + half_file_offset(index), half_bytes()};
}
std::uint64_t Segment::batches() const noexcept {
  return control().header.progress_words;
}
std::span<std::uint64_t> Segment::progress(unsigned half) noexcept {
  const auto& header = control().header;
  std::byte* const first =
      impl_->base() + header.progress_offset + (half & 1u) * progress_table_bytes(header.progress_words);
  return {reinterpret_cast<std::uint64_t*>(first), static_cast<std::size_t>(header.progress_words)};
}
int Segment::file() const noexcept {
  return impl_->fd.get();
}
Result<UniqueFd> Segment::hand_over() const {
  UniqueFd fd(::fcntl(file(), F_DUPFD_CLOEXEC, 0));
  if (!fd) return Error::from_errno("hand over segment " + file_of(path()).string(), errno);
  return fd;
}
Result<UniqueFd> Segment::hand_over_to_read() const {
  // The open file, whatever has its name by now.
  UniqueFd fd(::open(("/proc/self/fd/" + std::to_string(file())).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return Error::from_errno("hand over segment " + file_of(path()).string() + " for reading", errno);
  return fd;
}
std::uint64_t Segment::half_file_offset(unsigned index) const noexcept {
  return control().header.half_offset[index & 1u];
}

}  // namespace deltasync::shm
