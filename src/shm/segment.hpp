// The shared segment: creation, adoption, validation and mapping. What lies where is in format/segment.hpp; what
// may happen when is in shm/protocol.hpp. shm_protocol.md has both in prose.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

struct SegmentPath {
  std::filesystem::path dir = "/dev/shm";  ///< anything else is mapped as an ordinary file (--shm-dir)
  std::string name;                        ///< file name inside dir
};

class Segment {
 public:
  /// What the segment needs to know of a layout.
  struct Geometry {
    std::uint64_t half_bytes = 0;
    std::uint64_t batches = 0;  ///< progress words of a half
    Digest128 layout_digest;
  };
  /// Agent: creates, reserves every page (posix_fallocate) before it touches any, writes the metadata, and
  /// publishes the ready word last. Mode 0600. `layout_encoded` and `sidecar_encoded` are kept in the segment, so that
  /// a restarted agent can serve. Errors: no_space (says how much is needed and how much there is), already_exists,
  /// permission.
  static Result<std::unique_ptr<Segment>> create(const SegmentPath& path, std::uint64_t generation,
                                                 const Geometry& geometry, ByteSpan layout_encoded,
                                                 ByteSpan sidecar_encoded);
  /// Maps an existing segment and validates all of its control block against the file's size. Errors: not_found,
  /// corrupt (names the field), unsupported (format version), permission (not ours, or not mode 0600).
  static Result<std::unique_ptr<Segment>> attach(const SegmentPath& path);
  /// The same of a file that is open for reading and writing, whether it has a name or not: `path` is for messages.
  static Result<std::unique_ptr<Segment>> attach(UniqueFd file, const SegmentPath& path);
  /// Removes the file, and then its side files (side_files.hpp). Mappings stay valid.
  static Status unlink(const SegmentPath& path);
  /// The same of this segment's file; nothing if its name is gone, or another's by now.
  Status remove_name();
  /// Its name leads to it: who comes later can adopt it.
  bool in_place() const;

  /// In a forked child, which does not inherit the mapping, it only closes the file.
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  ControlBlock& control() noexcept;
  const ControlBlock& control() const noexcept;
  const SegmentPath& path() const noexcept;
  std::uint64_t generation() const noexcept;
  Digest128 layout_digest() const noexcept;
  ByteSpan layout_encoded() const noexcept;
  ByteSpan sidecar_encoded() const noexcept;
  std::uint64_t half_bytes() const noexcept;
  MutByteSpan half(unsigned index) noexcept;
  /// How many progress words each half has, and those of one.
  std::uint64_t batches() const noexcept;
  std::span<std::uint64_t> progress(unsigned half) noexcept;
  /// For sendfile: a descriptor of the segment's file (owned by the segment), and where a half starts in it.
  int file() const noexcept;
  /// Another descriptor of the same file, to be handed to a writer, who needs no name then.
  Result<UniqueFd> hand_over() const;
  /// One that is open for reading only, for who shall never write (segment_view.hpp).
  Result<UniqueFd> hand_over_to_read() const;
  std::uint64_t half_file_offset(unsigned index) const noexcept;

 private:
  struct Impl;
  explicit Segment(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// "NAME" of "NAME.g12", which is how agents call their segments; nothing if that is none.
std::optional<std::string> agent_of_segment(const std::string& name);

/// Names become file names: letters, digits, '.', '_' and '-', not starting with a dot, at most 200 bytes.
Status check_segment_name(const std::string& name);

/// An exclusive lock that says "an agent owns the segments of this name"; freed by the kernel when the process
/// ends, however it ends. already_exists names the owner's pid.
class AgentLock {
 public:
  static Result<AgentLock> acquire(const std::filesystem::path& dir, const std::string& name);
  AgentLock(AgentLock&&) noexcept;
  AgentLock& operator=(AgentLock&&) noexcept;
  ~AgentLock();
  /// The lock's file goes when the lock is released. Without this it stays, for the next agent of the name.
  void remove_on_release() noexcept { remove_ = true; }
  const std::filesystem::path& file() const noexcept { return file_; }
  /// Removes the lock's file now, if the name still leads to it. The lock is held on, and excludes nobody any more.
  void remove() noexcept;
  /// False once its file's name has been removed, or taken by another: then it excludes nobody who comes later.
  bool in_place() const;
  /// One line of at most 4,096 bytes, for the next owner as well. Empty: none was written.
  const std::string& note() const noexcept { return note_; }
  /// Errors: invalid_argument, or what the file system says.
  Status write_note(std::string note);

 private:
  AgentLock(int fd, std::filesystem::path file) : fd_(fd), file_(std::move(file)) {}
  Status write() const;
  void release() noexcept;
  int fd_;
  std::filesystem::path file_;
  std::string note_;
  bool remove_ = false;
};

}  // namespace deltasync::shm
