// u64 file size, then the first bytes of a segment's file; the rest is zero. Hashes are put right first, so that what
// is behind them is reached. A segment that is accepted has all of its parts inside the file.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/bytes.hpp"
#include "shm/validate.hpp"

#ifdef DELTASYNC_SANITIZED
#include <sanitizer/asan_interface.h>
#endif

namespace {

using namespace deltasync;
using namespace deltasync::shm;

/// Zeros, of which nearly none are ever touched; reading behind them is seen.
class File {
 public:
  explicit File(std::uint64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    void* const at = ::mmap(nullptr, mapped(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::abort();
    data_ = static_cast<std::byte*>(at);
    ::mprotect(data_ + mapped() - kPageBytes, kPageBytes, PROT_NONE);
#ifdef DELTASYNC_SANITIZED
    ASAN_POISON_MEMORY_REGION(data_ + bytes_, mapped() - bytes_);
#endif
  }
  ~File() {
#ifdef DELTASYNC_SANITIZED
    ASAN_UNPOISON_MEMORY_REGION(data_ + bytes_, mapped() - bytes_);
#endif
    ::munmap(data_, mapped());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  std::byte* data() const {
    return data_;
  }

 private:
  static constexpr std::size_t kPageBytes = 4096;
  std::size_t mapped() const {
    return (bytes_ + 2 * kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

bool inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t file_bytes) {
  return offset <= file_bytes && bytes <= file_bytes - offset;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::uint64_t kFileBytesMax = 16u << 20;
  if (size < 8) return 0;
  const auto file_bytes = load<std::uint64_t>(reinterpret_cast<const std::byte*>(data));
  if (file_bytes < kControlBytes || file_bytes > kFileBytesMax) return 0;
  const File file(file_bytes);
  auto* base = file.data();
  std::memcpy(base, data + 8, std::min<std::size_t>(size - 8, static_cast<std::size_t>(file_bytes)));
  (void)check_control(base, file_bytes);
  auto& header = reinterpret_cast<ControlBlock*>(base)->header;
  const auto metadata_end = header.sidecar_offset + header.sidecar_bytes;
  if (header.layout_offset <= metadata_end && metadata_end <= file_bytes) {
    header.metadata_hash = metadata_hash(header, base);
  }
  header.header_hash = header_hash(header);
  if (!check_control(base, file_bytes)) return 0;
  if (!inside(header.layout_offset, header.layout_bytes, file_bytes)) std::abort();
  if (!inside(header.sidecar_offset, header.sidecar_bytes, file_bytes)) std::abort();
  const auto progress_bytes = kHalves * progress_table_bytes(header.progress_words);
  if (!inside(header.progress_offset, progress_bytes, file_bytes)) std::abort();
  for (const auto offset : header.half_offset) {
    if (!inside(offset, header.half_bytes, file_bytes)) std::abort();
  }
  return 0;
}
