#include "delta/kept_delta.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/fd.hpp"
#include "base/hash.hpp"
#include "base/label.hpp"
#include "delta/container.hpp"
#include "format/mapped_file.hpp"

namespace deltasync::delta {
namespace {

constexpr std::uint64_t kKeptMagic = 0x31445450454B5344;  // "DSKEPTD1"
constexpr std::uint32_t kKeptVersion = 1;

struct KeptHeader {
  std::uint64_t magic = kKeptMagic;
  std::uint32_t version = kKeptVersion;
  std::uint32_t flags = 0;  ///< zero
  std::uint64_t list_bytes = 0;
  std::uint64_t list_hash = 0;  ///< XXH3-64
  std::uint64_t reserved = 0;   ///< zero
  std::uint64_t header_hash = 0;
};
static_assert(sizeof(KeptHeader) == 48 && std::has_unique_object_representations_v<KeptHeader>);
static_assert(offsetof(KeptHeader, list_bytes) == 16 && offsetof(KeptHeader, header_hash) == 40);

std::uint64_t hash_kept(const KeptHeader& header) {
  return xxh3_64(bytes_of(header).first(offsetof(KeptHeader, header_hash)));
}

Error bad_kept(const std::string& what) {
  return {Errc::corrupt, "kept delta: " + what};
}

/// The labels and the digests before.
Status read_list(ByteSpan list, const Layout& layout, KeptDelta& entry) {
  ByteReader in(list);
  entry.from.label = in.get_string(kLabelBytesMax);
  entry.to.label = in.get_string(kLabelBytesMax);
  const auto tiles = in.get<std::uint64_t>();
  if (in.failed() || tiles != in.remaining() / sizeof(DigestBefore))
    return bad_kept("its list is not as long as it says");
  entry.before.reserve(static_cast<std::size_t>(tiles));
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < tiles; ++i) {
    const auto tile = in.get<std::uint64_t>();
    if (tile < next || tile >= layout.tile_count())
      return bad_kept("tile " + std::to_string(tile) + " is out of order");
    entry.before.push_back({tile, in.get<std::uint64_t>()});
    next = tile + 1;
  }
  DS_TRY(in.finish("kept delta"));
  for (const auto* label : {&entry.from.label, &entry.to.label}) {
    if (auto checked = check_label(*label); !checked) return bad_kept(checked.error().message());
  }
  return {};
}

Status write_all(int fd, ByteSpan bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Error::from_errno("write " + path.string(), errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

}  // namespace

std::vector<std::byte> kept_delta_head(const Delta& delta, const Version& from, const Version& to,
                                       std::span<const DigestBefore> before) {
  std::vector<std::byte> list;
  ByteWriter out(list);
  out.put_string(from.label);
  out.put_string(to.label);
  out.put<std::uint64_t>(before.size());
  for (const DigestBefore& one : before) {
    out.put(one.tile);
    out.put(one.digest);
  }
  KeptHeader header;
  header.list_bytes = list.size();
  header.list_hash = xxh3_64(list);
  header.header_hash = hash_kept(header);
  std::vector<std::byte> head;
  ByteWriter writer(head);
  writer.append(bytes_of(header));
  writer.append(list);
  writer.append(container_header(delta));
  return head;
}

Result<KeptDelta> decode_kept_delta(ByteSpan file, const Layout& layout) {
  if (file.size() < sizeof(KeptHeader)) return bad_kept("truncated header");
  const auto header = load<KeptHeader>(file.data());
  if (header.magic != kKeptMagic) return bad_kept("wrong magic");
  if (header.header_hash != hash_kept(header)) return bad_kept("header hash differs");
  if (header.version != kKeptVersion) {
    return Error(Errc::unsupported, "kept delta: format version " + std::to_string(header.version));
  }
  if (header.flags != 0 || header.reserved != 0) return bad_kept("reserved fields are not zero");
  file = file.subspan(sizeof(KeptHeader));
  if (header.list_bytes > file.size()) return bad_kept("truncated list");
  const ByteSpan list = file.first(static_cast<std::size_t>(header.list_bytes));
  if (xxh3_64(list) != header.list_hash) return bad_kept("list hash differs");
  KeptDelta read;
  DS_TRY(read_list(list, layout, read));
  DS_ASSIGN(read.delta, from_container(file.subspan(list.size()), layout));
  read.from.id = read.delta.from;
  read.to.id = read.delta.to;
  return read;
}

Status write_kept_delta(const std::filesystem::path& path, ByteSpan head, std::span<const Frame> frames,
                        const std::function<bool()>& over) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return Error::from_errno("create " + path.string(), errno);
  Status status = write_all(fd.get(), head, path);
  for (const Frame& frame : frames) {
    if (!status) break;
    status = over && over() ? Status(Error(Errc::cancelled, "the agent ends")) : write_all(fd.get(), frame.bytes, path);
  }
  if (!status) ::unlink(path.c_str());
  return status;
}

Result<KeptDelta> read_kept_delta(const std::filesystem::path& path, const Layout& layout) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return Error::from_errno("look at " + path.string(), errno);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) {
    return Error(Errc::permission, "is no regular file of this user");
  }
  DS_ASSIGN(const MappedFile file, MappedFile::open(path));
  return decode_kept_delta(file.bytes(), layout);
}

}  // namespace deltasync::delta
